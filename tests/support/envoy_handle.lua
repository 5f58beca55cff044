--[[
A stand-in for the stream handle that Envoy gives to a Lua filter, as far as usage.lua uses it, with Envoy's own rules: a
chunk is dead after the step that brought it, a dynamic-metadata object too, and a stream that is cut never resumes the script.

play(chunks, metadata, headers, ending, clock) -> bytes to the client, metadata, log, `x-din-cost`
  ending: "data" the last chunk ends the stream, "empty" an empty chunk does, "trailers" trailers do, "cut" nothing does
every_split(body, metadata, headers) -> 0, or the first cut that changes the bytes or the facts
--]]

EnvoyTimestampResolution = { MILLISECOND = 1, MICROSECOND = 2 }

local function alive(step, now, what)
  if step ~= now() then error(what .. ": object used outside of proper scope", 3) end
end

local function make_chunk(data, step, now)
  local chunk = { data = data }
  function chunk:length() alive(step, now, "chunk"); return #self.data end
  function chunk:getBytes(from, size)
    alive(step, now, "chunk")
    if from < 0 or size < 0 or from + size > #self.data then error("index/length must be >= 0 and within the buffer", 2) end
    return self.data:sub(from + 1, from + size)
  end
  function chunk:setBytes(bytes) alive(step, now, "chunk"); self.data = bytes; return #bytes end
  return chunk
end

function play(chunks, metadata, headers, ending, clock)
  local step, ended, log = 0, false, {}
  local now = function() return step end
  local known = { din = {} }
  for key, value in pairs(metadata) do known.din[key] = value end
  local handle = {}
  function handle:headers()
    local born = step
    return {
      get = function(_, name) alive(born, now, "headers"); return headers[name] end,
      remove = function(_, name) alive(born, now, "headers"); headers[name] = nil end,
      replace = function(_, name, value) alive(born, now, "headers"); headers[name] = value end,
    }
  end
  function handle:timestampString(resolution)
    assert(resolution == EnvoyTimestampResolution.MICROSECOND)
    return tostring(clock and clock[step] or 1)
  end
  function handle:logErr(text) log[#log + 1] = text end
  function handle:streamInfo()
    local born = step
    return {
      dynamicMetadata = function()
        alive(born, now, "streamInfo")
        return {
          get = function(_, space) alive(born, now, "metadata"); return known[space] end,
          set = function(_, space, key, value)
            alive(born, now, "metadata")
            known[space][key] = value
          end,
        }
      end,
    }
  end
  function handle:bodyChunks()
    return function()
      if ended then return nil end
      return coroutine.yield()
    end
  end
  function handle:body()
    local all = {}
    while not ended do
      local chunk = coroutine.yield()
      if chunk then all[#all + 1] = chunk:getBytes(0, chunk:length()) end
    end
    return make_chunk(table.concat(all), step, now)
  end
  local script = coroutine.create(envoy_on_response)
  local function resume(value)
    if coroutine.status(script) == "suspended" then
      local fine, message = coroutine.resume(script, value)
      if not fine then error(message, 0) end
    end
  end
  local out = {}
  local function pass(data, last)
    step, ended = step + 1, last
    local chunk = make_chunk(data, step, now)
    resume(chunk)
    out[#out + 1] = chunk.data
  end
  resume(handle)
  for index = 1, #chunks do pass(chunks[index], ending == "data" and index == #chunks) end
  if ending == "empty" then pass("", true) end
  if ending == "trailers" then step, ended = step + 1, true; resume(nil) end
  return table.concat(out), known.din, table.concat(log, "\n"), headers["x-din-cost"]
end

local function same(one, other)
  for key, value in pairs(one) do if other[key] ~= value then return false end end
  for key, value in pairs(other) do if one[key] ~= value then return false end end
  return true
end

local function copy(headers)
  local all = {}
  for key, value in pairs(headers) do all[key] = value end
  return all
end

function every_split(body, metadata, headers)
  local bytes, facts = play({ body }, metadata, copy(headers), "data")
  for cut = 1, #body - 1 do
    local got, found = play({ body:sub(1, cut), body:sub(cut + 1) }, metadata, copy(headers), cut % 2 == 0 and "data" or "empty")
    if got ~= bytes or not same(found, facts) then return cut end
  end
  local single = {}
  for at = 1, #body do single[at] = body:sub(at, at) end
  local got, found = play(single, metadata, copy(headers), "data")
  if got ~= bytes or not same(found, facts) then return -1 end
  return 0
end
