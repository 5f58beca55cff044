-- Renew: extend the leases and the record of a running request, even if its lease has expired.
--
-- KEYS[1]          the request's record
-- KEYS[2 .. n+1]   the leases of its budgets that limit requests in flight
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
local record = redis.call('GET', KEYS[1])
if not record then return 0 end
local expires, reserved, state = struct.unpack('>ddB', record)
if expires <= now or state >= 2 then return 0 end

local lease = tonumber(ARGV[3])
for i = 2, #KEYS do
  redis.call('ZADD', KEYS[i], now + lease, ARGV[2])
  if redis.call('PTTL', KEYS[i]) < lease then redis.call('PEXPIRE', KEYS[i], 2 * lease) end
end

expires = math.max(expires, now + math.max(KEEP, lease))
redis.call('SET', KEYS[1], struct.pack('>ddB', expires, reserved, state) .. string.sub(record, 18), 'PX', expires - now)
return 1
