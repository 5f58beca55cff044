-- Reserve: check every budget of a request, then charge every budget. A denial writes nothing.
--
-- KEYS[1]              the request's record
-- KEYS[2 .. n+1]       the budgets' counters, one string each
-- KEYS[n+2 .. n+s+1]   the spending counters of periods, one string each
-- KEYS[n+s+2 .. ]      the budgets' leases, one sorted set each
-- ARGV[1]              three doubles per budget: rpm, tpm, max_streams (0: not limited)
-- ARGV[2]              one digit per budget, then per counter of a period: 1 enforced, 0 only counted; '' means that all are enforced
-- ARGV[3]              the charges, opaque to this script: stored in the record for the replica that ends the request
-- ARGV[4]              the time in ms, for tests only; '' means Redis TIME, the only clock in production
-- ARGV[5]              request id
-- ARGV[6]              three doubles: tokens, lease in ms, cost
-- ARGV[7]              only where s > 0: five doubles per counter of a period: its start, that of the next period and of the one after
--                      that (ms), and the limits of tokens and cost (0: not limited)
-- RETURNS {1, again, roomy, 0, 0, status} granted (again 1: it was granted before, and this is that reply;
--         roomy 1: slots are plentiful, so their release can wait for the settlement),
--         or {0, budget, dimension, limit, retry after ms, status} denied,
--         or {2, budget, dimension, limit, retry after ms, status} granted; that budget, which is only counted, is exceeded.
--         budget counts from 1, the counters of periods after the n others; dimension is 1 rpm, 2 tpm, 3 max_streams, 4 oversize,
--         5 tokens of a period, 6 cost of a period;
--         status is limit, remaining and reset ms of requests, then of tokens, -1 where there is no limit.
--
-- Counters: used tokens (in 1/60000 token, so that one ms drains exactly tpm), the time of that value, the newest second that
-- admitted a request, the number of requests in the ring, and the ring: 61 seconds, 3 bytes each. They store no limit: a changed
-- limit applies to the counted usage at once. Usage is capped at the tokens of two windows, so it is drained when the key
-- expires. A request counts until its whole second is 60 s old: never early, at most 1 s late.
-- Leases: request ids, scored by expiry. Expired leases are removed when the limit is reached.
-- Counters of a period: the fields of `SpendingCounters`, one double each. A reservation that is never settled expires in the
-- hour after the next. A denial sets the mark that a request was refused in this period, and writes nothing else.
-- Record: expires, tokens, state (1 settled + 2 released), status, time of admission, its cost where s > 0, and the note.
-- The same arithmetic in Python: admit/budget.py, admit/spending.py and admit/in_memory_ledger.py.

local SLOTS, UNIT, KEEP = 61, 60000, 120000
local HOUR, DAY, KEEP_SPENDING = 3600000, 86400000, 21600000
local PERIOD = '>dddddddddddddd'
local FEW_STREAMS = 8 -- a smaller limit is never roomy
local SLOT = '\0\0\0'
local call, read, pack, sub, rep, max, floor = redis.call, struct.unpack, struct.pack, string.sub, string.rep, math.max, math.floor

local limits, enforced, charges, now, id = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local budgets = #limits / 24
local spends = #KEYS - 1 - 2 * budgets
local leased = budgets + spends + 1
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end
local tokens, lease, cost = read('>ddd', ARGV[6])
local found = call('MGET', unpack(KEYS, 1, leased))

if found[1] then
  local expires, _, _, lr, rr, sr, lt, rt, st = read('>ddBdddddd', found[1])
  if expires > now then return {1, 1, 0, 0, 0, lr, rr, sr, lt, rt, st} end
end

local function slot(ring, second)
  return (read('>I3', ring, second % SLOTS * 3 + 1))
end

-- Advance the ring to `second`: counts outside the window become zero and leave the total.
local function advance_ring(ring, total, head, second)
  if second - head >= SLOTS then return rep(SLOT, SLOTS), 0 end
  for old = head + 1 - SLOTS, second - SLOTS do total = total - slot(ring, old) end
  local first, last = (head + 1) % SLOTS, second % SLOTS
  if first <= last then
    return sub(ring, 1, first * 3) .. rep(SLOT, last - first + 1) .. sub(ring, last * 3 + 4), total
  end
  return rep(SLOT, last + 1) .. sub(ring, last * 3 + 4, first * 3) .. rep(SLOT, SLOTS - first), total
end

local worst, refusal, missed, overlooked = 0, nil, 0, nil
local function refuse(budget, dimension, limit, wait)
  if enforced ~= '' and sub(enforced, budget, budget) == '0' then
    if wait > missed then missed, overlooked = wait, {2, budget, dimension, limit, wait} end
  elseif wait > worst then
    worst, refusal = wait, {0, budget, dimension, limit, wait}
  end
end

local states, crowded, roomy = {}, {}, 1
local limit_requests, left_requests, reset_requests = -1, math.huge, -1
local limit_tokens, left_tokens, reset_tokens = -1, math.huge, -1

for i = 1, budgets do
  local rpm, tpm, streams = read('>ddd', limits, 24 * i - 23)
  local used, at, head, total, ring = 0, now, 0, 0, ''
  local value = found[i + 1]
  if value then
    used, at, head, total = read('>ddI4I4', value)
    ring = sub(value, 25)
  end
  if rpm > 0 then
    local second = floor(now / 1000)
    if ring == '' then
      ring, head = rep(SLOT, SLOTS), second
    elseif second > head then
      ring, total = advance_ring(ring, total, head, second)
      if total == 0 then head = second end
    elseif head - second >= SLOTS then -- the clock was set back: discard earlier counts
      ring, head, total = rep(SLOT, SLOTS), second, 0
    end
    if total >= rpm then
      local excess, old = total + 1 - rpm, max(head, second) - SLOTS
      repeat
        old = old + 1
        excess = excess - slot(ring, old)
      until excess <= 0
      refuse(i, 1, rpm, (old + SLOTS) * 1000 - now)
    end
  end
  if tpm > 0 then
    used = max(0, math.min(used, 2 * tpm * UNIT) - max(0, now - at) * tpm)
    at = now
    local over = used + (tokens - tpm) * UNIT
    if tokens > tpm then
      refuse(i, 4, tpm, math.huge)
    elseif over > 0 then
      refuse(i, 2, tpm, math.ceil(over / tpm))
    end
  end
  if streams > 0 then
    local leases = KEYS[leased + i]
    local held = call('ZCARD', leases)
    if streams < FEW_STREAMS or 2 * (held + 1) > streams then roomy = 0 end
    if held >= streams then
      local last = call('ZRANGE', leases, held - streams, held - streams, 'WITHSCORES')
      if tonumber(last[2]) > now then refuse(i, 3, streams, tonumber(last[2]) - now) end
      crowded[i] = true
    end
  end
  states[i] = {rpm, tpm, streams, used, at, head, total, ring}
end

local writes, wholes = nil, nil
local limit_spending, left_spending, reset_spending = -1, math.huge, -1
if spends > 0 then
  local hour, windows = floor(now / HOUR), ARGV[7]
  writes = {0, 0} -- room for two at once
  for i = 1, spends do
    local start, finish, last, most_tokens, most_cost = read('>ddddd', windows, 40 * i - 39)
    local value = found[budgets + 1 + i]
    local from, before, before_tokens, before_cost, more_tokens, more_cost, refused, slot = 0, 0, 0, 0, 0, 0, 0, 0
    local tokens_spent, cost_spent, held, held_cost, older, older_cost = 0, 0, 0, 0, 0, 0
    if value then
      from, before, before_tokens, before_cost, more_tokens, more_cost, refused, slot,
        tokens_spent, cost_spent, held, held_cost, older, older_cost = read(PERIOD, value)
    end
    if now >= finish then start, finish = finish, last end
    local whole = false -- all fields are written, not only the held tokens and cost
    if from < start then
      whole, from, before, before_tokens, before_cost = true, start, from, tokens_spent, cost_spent
      more_tokens, more_cost, refused, slot, tokens_spent, cost_spent, held, held_cost, older, older_cost = 0, 0, 0, hour, 0, 0, 0, 0, 0, 0
    elseif hour > slot then
      whole, older, older_cost = true, 0, 0
      if hour == slot + 1 then older, older_cost = held, held_cost end
      slot, held, held_cost = hour, 0, 0
    end
    local wait, noted = finish > now and finish - now or 1, refused
    if most_tokens > 0 then
      local most = most_tokens + more_tokens
      local left = most - tokens_spent - held - older
      if tokens > left then
        refuse(budgets + i, 5, most, wait)
        noted, left = 1, max(0, left)
      end
      if left < left_spending and (enforced == '' or sub(enforced, budgets + i, budgets + i) == '1') then
        limit_spending, left_spending, reset_spending = most, left, wait
      end
    end
    if most_cost > 0 and cost_spent + held_cost + older_cost + cost > most_cost + more_cost then
      refuse(budgets + i, 6, most_cost + more_cost, wait)
      noted = 1
    end
    writes[i] = pack('>dd', held + tokens, held_cost + cost)
    if whole or noted ~= refused then
      local head = pack('>dddddddddd', from, before, before_tokens, before_cost, more_tokens, more_cost, noted, slot, tokens_spent, cost_spent)
      wholes = wholes or {}
      wholes[i] = {head, pack('>dd', held, held_cost), pack('>dd', older, older_cost), noted ~= refused, max(0, last - now) + DAY}
    end
  end
end

local charged = refusal and 0 or 1
for i = 1, budgets do
  local state = states[i]
  local rpm, tpm, head, total = state[1], state[2], state[6], state[7]
  if rpm > 0 then
    if charged == 1 then
      head, total = max(head, floor(now / 1000)), total + 1
      state[6], state[7] = head, total
    end
    local left = max(0, rpm - total)
    if left < left_requests then
      limit_requests, left_requests = rpm, left
      reset_requests = total > 0 and (head + SLOTS) * 1000 - now or 0
    end
  end
  if tpm > 0 then
    local used = math.min(state[4] + charged * tokens * UNIT, 2 * tpm * UNIT)
    state[4] = used
    local left = max(0, floor((tpm * UNIT - used) / UNIT))
    if left < left_tokens then
      limit_tokens, left_tokens, reset_tokens = tpm, left, math.ceil(used / tpm)
    end
  end
end

for i = 1, spends do
  local key, whole = KEYS[budgets + i + 1], wholes and wholes[i]
  if whole then
    if charged == 1 or whole[4] then call('SET', key, whole[1] .. (charged == 1 and writes[i] or whole[2]) .. whole[3], 'PX', whole[5]) end
  elseif charged == 1 then
    call('SETRANGE', key, 80, writes[i])
  end
end
local left = left_spending - charged * tokens
if left < left_tokens then limit_tokens, left_tokens, reset_tokens = limit_spending, left, reset_spending end

local reply = refusal or overlooked or {1, 0, roomy, 0, 0}
if reply[3] == 4 then reply[5] = 0 end
reply[6], reply[7], reply[8] = limit_requests, limit_requests < 0 and -1 or left_requests, reset_requests
reply[9], reply[10], reply[11] = limit_tokens, limit_tokens < 0 and -1 or left_tokens, reset_tokens
if refusal then return reply end

for i = 1, budgets do
  local rpm, tpm, streams, used, at, head, total, ring = unpack(states[i])
  if rpm > 0 then
    local start = head % SLOTS * 3
    ring = sub(ring, 1, start) .. pack('>I3', slot(ring, head) + 1) .. sub(ring, start + 4)
  end
  if rpm > 0 or tpm > 0 then
    call('SET', KEYS[i + 1], pack('>ddI4I4', used, at, head, total) .. ring, 'PX', KEEP)
  end
  if streams > 0 then
    local leases = KEYS[leased + i]
    if crowded[i] then call('ZREMRANGEBYSCORE', leases, '-inf', now) end
    call('ZADD', leases, now + lease, id)
    if call('PTTL', leases) < lease then call('PEXPIRE', leases, 2 * lease) end
  end
end
local kept = max(KEEP, lease, spends > 0 and KEEP_SPENDING or 0)
local format = spends > 0 and '>ddBdddddddd' or '>ddBddddddd' -- without a period's counter the cost is left out
local header = pack(format, now + kept, tokens, 0, reply[6], reply[7], reply[8], reply[9], reply[10], reply[11], now, cost)
call('SET', KEYS[1], header .. charges, 'PX', kept)
return reply
