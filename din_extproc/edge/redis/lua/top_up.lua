-- Top up: raise the spending limit of the current period of a budget.
--
-- KEYS[1]   the counter, see admit.lua
-- ARGV[1]   the time in ms, for tests only; '' means Redis TIME
-- ARGV[2]   three doubles: the start of the period, of the next one, and of the one after that (ms)
-- ARGV[3]   tokens to add
-- ARGV[4]   cost to add
-- ARGV[5]   1: add the spent amounts as well, so that the whole budget is available again; 0: do not
-- RETURNS 1.
--
-- The spent amounts never change: they equal the audit log. An addition ends with its period.

local PERIOD = '>dddddddddddddd'

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local start, finish, last = struct.unpack('>ddd', ARGV[2])
if now >= finish then start = finish end
local value = redis.call('GET', KEYS[1])
local period = value and {struct.unpack(PERIOD, value)} or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
if period[1] < start then
  period = {start, period[1], period[9], period[10], 0, 0, 0, math.floor(now / 3600000), 0, 0, 0, 0, 0, 0}
end
if ARGV[5] == '1' then period[5], period[6] = period[9], period[10] end
period[5], period[6], period[7] = period[5] + tonumber(ARGV[3]), period[6] + tonumber(ARGV[4]), 0
redis.call('SET', KEYS[1], struct.pack(PERIOD, unpack(period, 1, 14)), 'PX', math.max(0, last - now) + 86400000)
return 1
