-- Prober: elect the replica that probes the nodes, and publish node health to the other replicas.
--
-- KEYS[1]   the replica that probes the nodes
-- ARGV[1]   replica id
-- ARGV[2]   lease in ms; 0: release it; -1: leave it unchanged
-- ARGV[3]   the channel
-- ARGV[4]   the message; empty: none
-- RETURNS 1 if the replica holds the lease, else 0.

local holder, lasts = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
local mine = not holder or holder == ARGV[1]
if mine and lasts > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', lasts)
elseif holder == ARGV[1] and lasts == 0 then
  redis.call('DEL', KEYS[1])
end
if ARGV[4] ~= '' then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
return (mine and lasts > 0) and 1 or 0
