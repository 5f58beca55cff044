-- Settle: replace the reserved tokens of a request with the actual ones (refund or extra charge), once, and release its slots.
--
-- KEYS[1]          the request's record
-- KEYS[2 .. n+1]   the counters of its budgets that limit tokens; where places come back, of those that limit requests too
-- KEYS[n+2 .. n+w+1]  keys that exist while requests wait: of the tenant, and of shared limits if charged
-- KEYS[n+w+2 .. n+w+s+1]  the counters of what may be spent in a period
-- KEYS[n+w+s+2 .. ]   the leases of its budgets that limit requests in flight
-- ARGV[1]          the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]          actual tokens
-- ARGV[3]          request id
-- ARGV[4]          the channel for wake-ups; the message is the name of the waiting key
-- ARGV[5]          w
-- ARGV[6]          a digit per counter: 1 the request's place in the window comes back, because no node was reached; '' none does
-- ARGV[7]          actual cost
-- ARGV[8]          s
-- ARGV[9 .. n+8]   the tpm of these budgets, as it was reserved under; 0: tokens are not limited
-- RETURNS 1 settled, 0 unknown, expired or already settled.
--
-- Formats: see admit.lua. A refund never lowers usage below zero; usage after an extra charge is capped at the tokens of two
-- windows, so it is drained before its key expires. A place comes back in the second that admitted the
-- request, so it is free no longer than it would have been taken. Records of before there was that time give no place back.
-- What was spent counts in the period in which the request was admitted.

local UNIT, KEEP, CLOSED, SLOTS = 60000, 120000, 10000, 61
local read, pack, sub = struct.unpack, struct.pack, string.sub

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local last = #ARGV - 7
local waits = last + tonumber(ARGV[5])
local spends = waits + tonumber(ARGV[8])
local found = redis.call('MGET', unpack(KEYS, 1, spends))
local record = found[1]
if not record then return 0 end
local expires, reserved, state = read('>ddB', record)
if expires <= now or state % 2 == 1 then return 0 end

-- Head, total and ring without one request of that second; the newest second that admitted one may be an older one then.
local function give_back(window, second)
  local head, total = read('>I4I4', window)
  if #window == 8 or second > head or head - second >= SLOTS then return window end
  local start = 8 + second % SLOTS * 3
  local count = read('>I3', window, start + 1)
  if count == 0 then return window end
  window = sub(window, 1, start) .. pack('>I3', count - 1) .. sub(window, start + 4)
  if total == 1 then
    head = 0
  else
    while read('>I3', window, 9 + head % SLOTS * 3) == 0 do head = head - 1 end
  end
  return pack('>I4I4', head, total - 1) .. sub(window, 9)
end

local difference, places, second = (tonumber(ARGV[2]) - reserved) * UNIT, ARGV[6], nil
if places ~= '' and string.byte(record, 66) < 128 then second = math.floor(read('>d', record, 66) / 1000) end
if difference ~= 0 or second then
  for i = 2, last do
    local tpm, value = tonumber(ARGV[i + 7]), found[i]
    local used, at, tail = 0, now, '\0\0\0\0\0\0\0\0'
    if value then
      used, at = read('>dd', value)
      tail = sub(value, 17)
    end
    if tpm > 0 and difference ~= 0 then
      used = math.max(0, math.min(used, 2 * tpm * UNIT) - math.max(0, now - at) * tpm)
      used, at = math.max(0, math.min(used + difference, 2 * tpm * UNIT)), now
    end
    if second and sub(places, i - 1, i - 1) == '1' then tail = give_back(tail, second) end
    redis.call('SET', KEYS[i], pack('>dd', used, at) .. tail, 'PX', KEEP)
  end
end

if spends > waits then
  local HOUR = 3600000
  local admitted, cost = read('>dd', record, 66)
  local tokens, paid, hour = tonumber(ARGV[2]), tonumber(ARGV[7]), math.floor(admitted / HOUR)
  for i = waits + 1, spends do
    local value = found[i]
    if value then
      local start, before, before_tokens, before_cost = read('>dddd', value)
      if admitted >= start then
        local slot, spent, spent_cost, held, held_cost, older, older_cost = read('>ddddddd', value, 57)
        if hour == slot then
          held, held_cost = held - reserved, held_cost - cost
        elseif hour == slot - 1 then
          older, older_cost = older - reserved, older_cost - cost
        end
        redis.call('SETRANGE', KEYS[i], 64, pack('>dddddd', spent + tokens, spent_cost + paid, held, held_cost, older, older_cost))
      elseif before > 0 and admitted >= before then
        redis.call('SETRANGE', KEYS[i], 16, pack('>dd', before_tokens + tokens, before_cost + paid))
      end
    end
  end
end

if state == 0 then
  for i = spends + 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[3]) end
end
for i = last + 1, waits do
  if found[i] then redis.call('PUBLISH', ARGV[4], KEYS[i]) end
end

expires = math.min(expires, now + CLOSED)
redis.call('SET', KEYS[1], pack('>ddB', expires, reserved, 3) .. sub(record, 18), 'PX', expires - now)
return 1
