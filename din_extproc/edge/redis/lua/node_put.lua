-- Node put: replace a node's row if it is still the row that the writer has read.
--
-- KEYS[1]   rows by node id, one hash; the first line of a row is its address
-- KEYS[2]   living nodes, one sorted set scored by the time of their death in ms
-- KEYS[3]   revision of every node's newest change, one sorted set
-- KEYS[4]   era and revision of the table, one hash; an era begins when the table is found empty
-- KEYS[5]   node ids by address, one hash: an address has one living node
-- KEYS[6]   nodes that died or left, one sorted set scored by that time in ms
-- ARGV[1]   channel for changes
-- ARGV[2]   node id
-- ARGV[3]   the revision that the writer has read; 0: no row
-- ARGV[4]   the row, "" to remove it
-- ARGV[5]   time until the node is dead without a heartbeat, in ms; 0: keep the current time
-- RETURNS {1, revision, now}; {0, revision, now, row, living} when the row differs; {2, 0, now, owner} when the address is taken.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id, place = ARGV[2], string.match(ARGV[4], '^[^\n]*')
local row = redis.call('HGET', KEYS[1], id)
local seen = row and tonumber(redis.call('ZSCORE', KEYS[3], id)) or 0
local lives = tonumber(redis.call('ZSCORE', KEYS[2], id) or 0)
if seen ~= tonumber(ARGV[3]) then return {0, string.format('%.0f', seen), now, row or '', lives > now and 1 or 0} end
local owner = redis.call('HGET', KEYS[5], place)
if owner and owner ~= id and tonumber(redis.call('ZSCORE', KEYS[2], owner) or 0) > now then
  return {2, '0', now, owner}
end
if redis.call('EXISTS', KEYS[4]) == 0 then
  local era = string.format('%.0f', now * 1000)
  redis.call('HSET', KEYS[4], 'era', era, 'revision', era)
end
local was = row and string.match(row, '^[^\n]*')
if was and was ~= place and redis.call('HGET', KEYS[5], was) == id then redis.call('HDEL', KEYS[5], was) end
local revision = string.format('%.0f', redis.call('HINCRBY', KEYS[4], 'revision', 1))
redis.call('ZADD', KEYS[3], revision, id)
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZADD', KEYS[6], now, id)
  lives = 0
else
  redis.call('HSET', KEYS[1], id, ARGV[4])
  local lasts = tonumber(ARGV[5])
  if lasts > 0 then
    lives = now + lasts
    redis.call('ZADD', KEYS[2], lives, id)
    redis.call('ZREM', KEYS[6], id)
    redis.call('HSET', KEYS[5], place, id)
  end
end
redis.call('PUBLISH', ARGV[1], revision .. ' ' .. (lives > now and 1 or 0) .. ' ' .. id .. '\n' .. ARGV[4])
return {1, revision, now}
