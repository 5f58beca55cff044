-- Node sweep: mark silent nodes dead, and remove nodes that have been dead for long.
--
-- KEYS      as in node_put.lua
-- ARGV[1]   channel for changes
-- ARGV[2]   retention of dead nodes in ms
-- ARGV[3]   maximum number of nodes to process of each kind
-- RETURNS the number of nodes that died.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function changed(id, row)
  local revision = string.format('%.0f', redis.call('HINCRBY', KEYS[4], 'revision', 1))
  redis.call('ZADD', KEYS[3], revision, id)
  redis.call('PUBLISH', ARGV[1], revision .. ' 0 ' .. id .. '\n' .. row)
end

local died = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[3])
for _, id in ipairs(died) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZADD', KEYS[6], now, id)
  changed(id, redis.call('HGET', KEYS[1], id) or '')
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', now - tonumber(ARGV[2]), 'LIMIT', 0, ARGV[3])) do
  local row = redis.call('HGET', KEYS[1], id)
  if row then
    local place = string.match(row, '^[^\n]*')
    if redis.call('HGET', KEYS[5], place) == id then redis.call('HDEL', KEYS[5], place) end
    redis.call('HDEL', KEYS[1], id)
    redis.call('ZADD', KEYS[6], now, id)
    changed(id, '')
  else
    redis.call('ZREM', KEYS[6], id)
    redis.call('ZREM', KEYS[3], id)
  end
end
return #died
