-- Release: give a request's slots back, because it has ended.
--
-- KEYS[1]          the request's record
-- KEYS[2 .. n+1]   the leases of the record's budgets, in the record's order
-- ARGV[1]          the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]          request id
-- RETURNS 1 released, 0 unknown, expired or already released.
--
-- Formats: see admit.lua. A released record waits two windows for its settlement, a settled one goes soon.

local KEEP, CLOSED = 120000, 10000

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
local record = cmsgpack.unpack(value)
local expires, state, charges = record[1], record[3], record[5]
if expires <= now or state >= 2 then return 0 end

for i = 2, #KEYS do
  if charges[2 * i - 2] > 0 then redis.call('ZREM', KEYS[i], ARGV[2]) end
end

expires = state == 1 and math.min(expires, now + CLOSED) or now + KEEP
record[1], record[3] = expires, state + 2
redis.call('SET', KEYS[1], cmsgpack.pack(record), 'PX', expires - now)
return 1
