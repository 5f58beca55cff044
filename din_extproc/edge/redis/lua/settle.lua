-- Settle: replace the reserved tokens of a request by the actual ones, both ways, once.
--
-- KEYS[1]          the request's record
-- KEYS[2 .. n+1]   the counters of the record's budgets, in the record's order
-- ARGV[1]          the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]          actual tokens
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
local found = redis.call('MGET', unpack(KEYS))
if not found[1] then return 0 end
local record = cmsgpack.unpack(found[1])
local expires, reserved, state, charges = record[1], record[2], record[3], record[5]
if expires <= now or state % 2 == 1 then return 0 end

local difference = (tonumber(ARGV[2]) - reserved) * UNIT
for i = 2, #KEYS do
  local tpm, value = charges[2 * i - 3], found[i]
  if tpm > 0 and difference ~= 0 then
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

if state == 2 then expires = math.min(expires, now + CLOSED) end
record[1], record[3] = expires, state + 1
redis.call('SET', KEYS[1], cmsgpack.pack(record), 'PX', expires - now)
return 1
