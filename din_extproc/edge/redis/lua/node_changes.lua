-- Node changes: return the changes of the table after a revision; after 0 the whole table.
--
-- KEYS      as in node_put.lua
-- ARGV[1]   the revision
-- ARGV[2]   maximum number of nodes
-- RETURNS {now in ms, era, revision of the table, {id, revision, living, row, id, ...}}; an empty row: the node was removed.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local table_of = redis.call('HMGET', KEYS[4], 'era', 'revision')
local found = {}
local ids = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
for at = 1, #ids, 2 do
  local id = ids[at]
  local lives = tonumber(redis.call('ZSCORE', KEYS[2], id) or 0)
  found[#found + 1] = id
  found[#found + 1] = string.format('%.0f', tonumber(ids[at + 1]))
  found[#found + 1] = lives > now and 1 or 0
  found[#found + 1] = redis.call('HGET', KEYS[1], id) or ''
end
return {now, table_of[1] or '0', table_of[2] or '0', found}
