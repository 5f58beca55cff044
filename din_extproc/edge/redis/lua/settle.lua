-- Settle: replace the reserved tokens of a request by the actual ones, both ways, once, and give back the slots that it still has.
--
-- KEYS[1]          the request's record
-- KEYS[2 .. n+1]   the counters of its budgets that limit tokens
-- KEYS[n+2 .. n+w+1]  one each for the tenant, and for what all tenants share where it was charged: there while somebody waits for it
-- KEYS[n+w+2 .. ]     the leases of its budgets that limit requests in flight
-- ARGV[1]          the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]          actual tokens
-- ARGV[3]          request id
-- ARGV[4]          the channel on which those who wait are told, by the name of the key that is there
-- ARGV[5]          w
-- ARGV[6 .. n+5]   the tpm of the budgets that limit tokens, as it was reserved under
-- RETURNS 1 settled, 0 unknown, expired or already settled.
--
-- Formats: see admit.lua. A refund never fills a bucket over its brim; an extra charge never counts more than two
-- windows' worth of tokens, so the bucket is drained before its key expires.

local UNIT, KEEP, CLOSED = 60000, 120000, 10000

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local last = #ARGV - 4
local waits = last + tonumber(ARGV[5])
local found = redis.call('MGET', unpack(KEYS, 1, waits))
local record = found[1]
if not record then return 0 end
local expires, reserved, state = struct.unpack('>ddB', record)
if expires <= now or state % 2 == 1 then return 0 end

local difference = (tonumber(ARGV[2]) - reserved) * UNIT
if difference ~= 0 then
  for i = 2, last do
    local tpm, value = tonumber(ARGV[i + 4]), found[i]
    local used, at, tail = 0, now, '\0\0\0\0\0\0\0\0'
    if value then
      used, at = struct.unpack('>dd', value)
      tail = string.sub(value, 17)
    end
    used = math.max(0, math.min(used, 2 * tpm * UNIT) - math.max(0, now - at) * tpm)
    used = math.max(0, math.min(used + difference, 2 * tpm * UNIT))
    redis.call('SET', KEYS[i], struct.pack('>dd', used, now) .. tail, 'PX', KEEP)
  end
end

if state == 0 then
  for i = waits + 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[3]) end
end
for i = last + 1, waits do
  if found[i] then redis.call('PUBLISH', ARGV[4], KEYS[i]) end
end

expires = math.min(expires, now + CLOSED)
redis.call('SET', KEYS[1], struct.pack('>ddB', expires, reserved, 3) .. string.sub(record, 18), 'PX', expires - now)
return 1
