-- Renew: keep the slots and the record of a request that still runs, even if its lease has run out meanwhile.
--
-- KEYS[1]          the request's record
-- KEYS[2 .. n+1]   the leases of the record's budgets, in the record's order
-- ARGV[1]          the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]          request id
-- ARGV[3]          lease in ms, from now
-- RETURNS 1 renewed, 0 unknown, expired or already released.
--
-- Formats: see admit.lua.

local KEEP = 120000

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
local record = cmsgpack.unpack(value)
local lease, charges = tonumber(ARGV[3]), record[5]
if record[1] <= now or record[3] >= 2 then return 0 end

for i = 2, #KEYS do
  if charges[2 * i - 2] > 0 then
    redis.call('ZADD', KEYS[i], now + lease, ARGV[2])
    if redis.call('PTTL', KEYS[i]) < lease then redis.call('PEXPIRE', KEYS[i], lease) end
  end
end

local expires = math.max(record[1], now + math.max(KEEP, lease))
record[1] = expires
redis.call('SET', KEYS[1], cmsgpack.pack(record), 'PX', expires - now)
return 1
