-- Release: release the slots of a request that has ended.
--
-- KEYS[1]          the request's record
-- KEYS[2 .. w+1]   as in settle.lua: keys that exist while requests wait
-- KEYS[w+2 .. ]    the leases of its budgets that limit requests in flight
-- ARGV[1]          the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]          request id
-- ARGV[3]          the channel for wake-ups; the message is the name of the waiting key
-- ARGV[4]          w
-- RETURNS 1 released, 0 unknown, expired or already released.
--
-- Formats: see admit.lua. A released record is kept for two windows until its settlement; longer if it is charged to a period.

local KEEP = 120000

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local last = 1 + tonumber(ARGV[4])
local found = redis.call('MGET', unpack(KEYS, 1, last))
local record = found[1]
if not record then return 0 end
local expires, reserved, state = struct.unpack('>ddB', record)
if expires <= now or state ~= 0 then return 0 end

for i = last + 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[2]) end
for i = 2, last do
  if found[i] then redis.call('PUBLISH', ARGV[3], KEYS[i]) end
end

local spends = string.byte(record, 66) < 128 and string.byte(record, 74) < 128
expires = spends and expires or now + KEEP
redis.call('SET', KEYS[1], struct.pack('>ddB', expires, reserved, 2) .. string.sub(record, 18), 'PX', expires - now)
return 1
