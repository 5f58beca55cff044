-- Prober: one replica of all asks the nodes; whoever knows something of nodes says it to the others.
--
-- KEYS[1]   who asks the nodes
-- ARGV[1]   replica id
-- ARGV[2]   how long it will ask, in ms; 0: not any more; -1: that is not the question
-- ARGV[3]   the channel
-- ARGV[4]   what is to be said there; empty: nothing
-- RETURNS 1: it is the one that asks, 0: another is.

local holder, lasts = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
local mine = not holder or holder == ARGV[1]
if mine and lasts > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', lasts)
elseif holder == ARGV[1] and lasts == 0 then
  redis.call('DEL', KEYS[1])
end
if ARGV[4] ~= '' then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
return (mine and lasts > 0) and 1 or 0
