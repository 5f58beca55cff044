-- Settle: replace the reserved tokens of requests with the actual ones (refund or extra charge), once each, and release their slots.
-- All of them have the same budgets.
--
-- KEYS[1 .. k]     the requests' records
-- then n           the counters of their budgets that limit tokens; if requests are given back, also of those that limit requests
-- then w           keys that exist while requests wait: of the tenant, and of shared limits if charged
-- then s           the spending counters of periods
-- then             the leases of their budgets that limit requests in flight
-- ARGV[1]          the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]          the channel for wake-ups; the message is the name of the waiting key
-- ARGV[3]          n, w and s, a byte each
-- ARGV[4]          a digit per counter: 1 removes the request from the window, because no node was reached; '' none is removed
-- ARGV[5 .. n+4]   the tpm of these budgets at the reservation; 0: tokens are not limited
-- then per request its id, actual tokens and actual cost
-- RETURNS the number of settled requests; the others are unknown, expired or already settled.
--
-- Formats: see admit.lua. A refund never lowers usage below zero; usage after an extra charge is capped at the tokens of two
-- windows, so it is drained before its key expires. A request is removed from the second that admitted it. Records of older versions
-- without the time of admission stay in the window.
-- Spending counts in the period in which the request was admitted.

local UNIT, KEEP, CLOSED, SLOTS, HOUR = 60000, 120000, 10000, 61, 3600000
local read, pack, sub = struct.unpack, struct.pack, string.sub

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local counters, waits, spends = string.byte(ARGV[3], 1, 3)
local removals, fixed = ARGV[4], 4 + counters
local records = (#ARGV - fixed) / 3
local found = redis.call('MGET', unpack(KEYS, 1, records + counters + waits + spends))

-- Head, total and ring without one request of that second; the head can then become an older second.
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

local first_spend = records + counters + waits
local tpms, used, read_at, tails, changed, slots, ended, settled = {}, {}, {}, {}, {}, {}, {}, 0
for i = 1, counters do
  local value = found[records + i]
  tpms[i], used[i], read_at[i], tails[i] = tonumber(ARGV[4 + i]), 0, now, '\0\0\0\0\0\0\0\0'
  if value then
    used[i], read_at[i] = read('>dd', value)
    tails[i] = sub(value, 17)
  end
end

local periods = {}
for i = 1, spends do
  local value = found[first_spend + i]
  if value then
    local start, before, before_tokens, before_cost = read('>dddd', value)
    local slot, spent, spent_cost, held, held_cost, older, older_cost = read('>ddddddd', value, 57)
    periods[i] = {
      start = start, before = before, before_tokens = before_tokens, before_cost = before_cost, slot = slot,
      spent = spent, spent_cost = spent_cost, held = held, held_cost = held_cost, older = older, older_cost = older_cost,
    }
  end
end

-- Add actual tokens and cost to the spent ones, and subtract the reserved ones from the held ones.
local function spend(period, admitted, hour, tokens, paid, reserved, cost)
  if admitted >= period.start then
    if hour == period.slot then
      period.held, period.held_cost = period.held - reserved, period.held_cost - cost
    elseif hour == period.slot - 1 then
      period.older, period.older_cost = period.older - reserved, period.older_cost - cost
    end
    period.spent, period.spent_cost, period.now = period.spent + tokens, period.spent_cost + paid, true
  elseif period.before > 0 and admitted >= period.before then
    period.before_tokens, period.before_cost, period.late = period.before_tokens + tokens, period.before_cost + paid, true
  end
end

for r = 1, records do
  local record, at = found[r], fixed + 3 * r - 2
  local expires, reserved, state = 0, 0, 0
  if record then expires, reserved, state = read('>ddB', record) end
  if expires > now and state % 2 == 0 and not ended[KEYS[r]] then
    local tokens = tonumber(ARGV[at + 1])
    local difference, second = (tokens - reserved) * UNIT, nil
    if removals ~= '' and string.byte(record, 66) < 128 then second = math.floor(read('>d', record, 66) / 1000) end
    for i = 1, counters do
      local tpm = tpms[i]
      if tpm > 0 and difference ~= 0 then
        used[i] = math.max(0, math.min(used[i], 2 * tpm * UNIT) - math.max(0, now - read_at[i]) * tpm)
        used[i], read_at[i] = math.max(0, math.min(used[i] + difference, 2 * tpm * UNIT)), now
      end
      if second and sub(removals, i, i) == '1' then tails[i] = give_back(tails[i], second) end
      changed[i] = changed[i] or difference ~= 0 or second ~= nil
    end
    if spends > 0 then
      local admitted, cost = read('>dd', record, 66)
      local hour, paid = math.floor(admitted / HOUR), tonumber(ARGV[at + 2])
      for i = 1, spends do
        if periods[i] then spend(periods[i], admitted, hour, tokens, paid, reserved, cost) end
      end
    end
    if state == 0 then slots[#slots + 1] = ARGV[at] end
    expires = math.min(expires, now + CLOSED)
    redis.call('SET', KEYS[r], pack('>ddB', expires, reserved, 3) .. sub(record, 18), 'PX', expires - now)
    ended[KEYS[r]] = true
    settled = settled + 1
  end
end
if settled == 0 then return 0 end

for i = 1, counters do
  if changed[i] then redis.call('SET', KEYS[records + i], pack('>dd', used[i], read_at[i]) .. tails[i], 'PX', KEEP) end
end
for i = 1, spends do
  local period, key = periods[i], KEYS[first_spend + i]
  if period and period.now then
    local changed = pack('>dddddd', period.spent, period.spent_cost, period.held, period.held_cost, period.older, period.older_cost)
    redis.call('SETRANGE', key, 64, changed)
  end
  if period and period.late then redis.call('SETRANGE', key, 16, pack('>dd', period.before_tokens, period.before_cost)) end
end
if #slots > 0 then
  for i = first_spend + spends + 1, #KEYS do redis.call('ZREM', KEYS[i], unpack(slots)) end
end
for i = records + counters + 1, first_spend do
  if found[i] then redis.call('PUBLISH', ARGV[2], KEYS[i]) end
end
return settled
