-- Presence: a process that decides says that it lives, and learns how many do.
--
-- KEYS[1]   these processes, one sorted set scored by expiry
-- ARGV[1]   the process's name
-- ARGV[2]   how long the word counts, in ms; 0: it leaves, or only asks
-- RETURNS how many live.

local time = redis.call('TIME')
local now, lasts = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if lasts > 0 then
  redis.call('ZADD', KEYS[1], now + lasts, ARGV[1])
  if redis.call('PTTL', KEYS[1]) < lasts then redis.call('PEXPIRE', KEYS[1], lasts) end
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return redis.call('ZCARD', KEYS[1])
