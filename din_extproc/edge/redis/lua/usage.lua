-- Usage: add the portion of one replica and day, once, even if it is sent again.
--
-- KEYS[1]   usage of the day, one hash: tenant, model and counter name, joined by tabs -> integer
-- KEYS[2]   number of the newest portion of each replica, one hash
-- ARGV[1]   replica
-- ARGV[2]   number of this portion: grows with every portion of the replica
-- ARGV[3]   retention of the day in s
-- ARGV[4 ..]  field, amount; and so on
-- RETURNS 1 added, 0 already added.

if tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0) >= tonumber(ARGV[2]) then return 0 end
for i = 4, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
