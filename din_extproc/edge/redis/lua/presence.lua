-- Presence: announce a deciding process, and return the number of such processes.
--
-- KEYS[1]   deciding processes, one sorted set scored by expiry
-- ARGV[1]   the process's name
-- ARGV[2]   validity of the announcement in ms; 0: withdraw it, or only read
-- RETURNS the number of live processes.

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
