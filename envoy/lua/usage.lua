--[[
usage.lua: count the tokens of a node's response inside Envoy, while the response streams through.

Rule: the client's bytes are the node's bytes, with four exceptions: a usage-only event that the client did not request is
removed; an in-band error is rewritten to the format of the client's API; a stream that ends without end marker and before
all its choices have finished is closed with an error event (`upstream_truncated`), because it would look complete (unless an
event passed unread); and a web page with a success status becomes a 502. An event is passed on when it is complete; an
internal fault ends the counting, never the stream.

IN    dynamic metadata, namespace `din`, set by ext_proc before the answer begins; without it, that of ext_authz
        request_id     without it (or with `refusal`) the response is ignored: it was not sent by a node
        strip_usage    true: remove the usage-only event (`choices: []` and usage) from the stream
        dialect        `messages` or `responses`: the client's error format; absent: that of chat completions
        ends           types of events that end a stream of this operation, besides those of the dialects
        choices        number of choices that a stream without end marker must finish; absent: those that began
        price          the prices for the header `x-din-cost` of a buffered response: six numbers, see `cost_of`; absent: no header
OUT   dynamic metadata, namespace `din`; absent when not seen
        prompt_tokens, completion_tokens, cached_tokens   the last usage that the engine sent; cached are part of prompt
        total_tokens   the sum, if the engine sent only the sum
        audio_seconds  the length of the audio input, rounded up
        bad_usage      true: a usage had an invalid count (negative, a fraction, a text, 1e12 or more), or was less than an
                       earlier one of the same response; then no usage of this response is valid
        deltas         events that carried a token in any channel; 0 or more for every event stream that was read
        delta_bytes    bytes of those tokens as JSON text
        first_token_us microseconds since the epoch when the first of them passed
        last_token_us  likewise the last one, of a complete response
        finish_reason  the last one that was neither null nor empty
        open_choices   number of unfinished choices, once another one has finished
        done           true: `[DONE]` (or the dialect's own end marker) passed, or a JSON body ended
        error          code or type of an in-band error, never its text
        fault          cause of an in-band error, unless it is the node: `request` (every node would refuse it), `busy` (back-pressure)
        bad_events     events that are not JSON although they should be, or longer than MAX_EVENT
        unread         true: an event was longer than MAX_EVENT, so the end marker may have passed unseen
        encoded        true: the response is compressed, so nothing was read

A client disconnect or a node failure ends this coroutine without a callback, so the counters must already be in the metadata:
they are written with every chunk that changed them, which costs half a microsecond.

Reading is cheap because the events of one stream differ only in their token: a parsed event leaves its text before and after
the token as a template, and an event that fits the template is not parsed.

Nodes echo parts of requests (`tools`, `metadata` of the Responses API), so a member is read only where the protocols define
it, see ROOT: a `usage`, `error` or `finish_reason` deeper in an echo is text from the client. Of a JSON body only its top-level
members are read. The nesting depth is tracked with plain finds, across chunks and in constant memory; after MAX_STRUCTURE
strings, braces and brackets the rest of a body is not read.
--]]

local byte, find, gmatch, gsub, match, sub = string.byte, string.find, string.gmatch, string.gsub, string.match, string.sub

local NAMESPACE = "din"
local PERMITS = "envoy.filters.http.ext_authz" -- namespace of the metadata that ext_authz returns
local MAX_EVENT = 1048576 -- bytes of one event that are buffered at most
local MAX_USAGE = 16384 -- bytes of a usage object in a JSON body
local MAX_TOKENS = 1e12 -- counts from here on are invalid
local MAX_CHOICES = 4096 -- choices of one stream that are tracked
local MAX_STRUCTURE = 1000000 -- strings, braces and brackets of a JSON body that are read
local UNSEEN = 64 -- output tokens without text that are accepted
local HEAD = 1024 -- bytes of a JSON body that are searched for an error
local CR, LF, SPACE, QUOTE, COLON, BRACKET, BACKSLASH, BRACE = 13, 10, 32, 34, 58, 91, 92, 123
local WHITE = { [9] = true, [10] = true, [13] = true, [32] = true } -- between the parts of a JSON text

local FAILED = '"The node failed."'
local CUT_OFF = '"The node ended the stream before the answer was complete."'
local ERROR = '{"message":%s,"type":"%s","param":null,"code":"%s"}'

-- Functions that return an error event of each dialect, from its message as JSON, its code, the stream's state and the type of error.
local ERRORS = {
  chat = function(message, code, _, kind)
    return 'data: {"error":' .. string.format(ERROR, message, kind == "invalid_request_error" and kind or "server_error", code) .. "}\n\n"
  end,
  messages = function(message, _, _, kind)
    return string.format('event: error\ndata: {"type":"error","error":{"type":"%s","message":%s}}\n\n', kind, message)
  end,
  -- Some clients read the flat event, some the `error` object, some agents only `response.failed`.
  responses = function(message, code, state, kind)
    local sequence, id = (tonumber(state.sequence) or 0) + 1, state.response_id or ""
    return string.format('event: error\ndata: {"type":"error","code":"%s","message":%s,"param":null,"sequence_number":%d,"error":', code, message, sequence)
      .. string.format(ERROR, message, kind == "invalid_request_error" and kind or "server_error", code)
      .. string.format('}\n\nevent: response.failed\ndata: {"type":"response.failed","sequence_number":%d,"response":{"id":"%s",', sequence + 1, id)
      .. string.format('"object":"response","status":"failed","output":[],"error":{"code":"%s","message":%s}}}\n\n', code, message)
  end,
}
-- Types of Anthropic's errors, which are kept.
local ANTHROPIC = {
  invalid_request_error = true, authentication_error = true, permission_error = true, not_found_error = true,
  request_too_large = true, rate_limit_error = true, overloaded_error = true, timeout_error = true,
}

-- Phrases and codes of errors for requests that no node can serve, in lower case.
local TOO_LONG = {
  "context length", "context_length", "context window", "contextwindow", "context size", "context_size", "maximum context",
  "maximum model length", "max_model_len", "maximum input length", "max_num_tokens", "max_new_tokens` must be", "must have less than",
  "prompt is too long", "prompt too long", "input is too long", "too many tokens",
}
local REFUSED = {
  "invalid_request", "badrequest", "bad_request", "validation_error", "validationerror", "validation error", "invalid_prompt",
  "unprocessable", "unsupported_", "content_policy", "content_filter", "request_too_large", "string_above_max_length",
}
local BUSY = { "overloaded", "rate_limit", "queue is full", "server busy", "upstream_busy" }
-- 4xx that are not caused by the request: the gateway chose the model's name and the credentials.
local NODES = { ["401"] = true, ["403"] = true, ["404"] = true, ["405"] = true, ["407"] = true, ["408"] = true, ["424"] = true }
local FAULT_BYTES = 4096 -- of an error that are searched for its cause

local PAGE = '{"type":"urn:din-extproc:error:upstream_error","title":"The node answered with an error","status":502,'
  .. '"detail":%s,"instance":"%s","code":"upstream_error","trace_id":"%s",'
  .. '"error":{"message":%s,"type":"server_error","param":null,"code":"upstream_error"}}'
local ANTHROPIC_PAGE = '{"type":"error","error":{"type":"api_error","message":%s},"request_id":"%s"}'
local NO_ANSWER = '"The node answered with a web page."'

-- Keys whose string values are output of the model.
local CHANNELS = {
  content = true, reasoning_content = true, reasoning = true, text = true, refusal = true, arguments = true, -- OpenAI
  thinking = true, partial_json = true, -- Anthropic
  delta = true, -- Responses
}

-- The members of an event that are read. Of each object: `speaks`, keys of strings that are model output; `strings`, other keys of
-- strings; `containers`, keys of objects and arrays; `into`, the schema of objects under a key, in arrays too; `others`, that under any
-- other key.
local NOTHING = {}
local OUTPUT = { speaks = CHANNELS, strings = NOTHING, containers = { tool_calls = true }, into = NOTHING }
OUTPUT.others = OUTPUT
local CHOICE = {
  speaks = CHANNELS, strings = { finish_reason = true, error = true }, containers = { error = true },
  into = { delta = OUTPUT, message = OUTPUT },
}
local MESSAGE = { speaks = CHANNELS, strings = NOTHING, containers = { usage = true }, into = NOTHING, others = OUTPUT } -- Anthropic
local RESPONSE = { speaks = NOTHING, strings = { error = true }, containers = { usage = true, error = true }, into = NOTHING }
local ROOT = {
  speaks = { delta = true }, -- of Responses: `text` of its other events repeats the deltas
  strings = { type = true, error = true, object = true, code = true, message = true },
  containers = { usage = true, error = true, choices = true },
  into = { choices = CHOICE, message = MESSAGE, response = RESPONSE, delta = OUTPUT, content_block = OUTPUT },
}

-- End markers of streams of the dialects other than chat.
local ENDINGS = { ["message_stop"] = true, ["response.completed"] = true, ["response.incomplete"] = true }

local FACTS = {
  "prompt_tokens", "completion_tokens", "cached_tokens", "total_tokens", "audio_seconds", "bad_usage", "deltas", "delta_bytes", "first_token_us",
  "last_token_us", "finish_reason", "open_choices", "done", "error", "fault", "bad_events", "unread", "encoded",
}

-- Whether the response is complete.
local function complete(state)
  return state.done or (state.finish_reason and (state.open_choices or 0) == 0)
end

-- Write the facts that changed.
local function write(state)
  local metadata, written = nil, state.written
  if state.passed and complete(state) then
    state.last_token_us = tonumber(state.passed)
  end
  for i = 1, #FACTS do
    local name = FACTS[i]
    local value = state[name]
    if value ~= written[name] then
      metadata = metadata or state.handle:streamInfo():dynamicMetadata()
      metadata:set(NAMESPACE, name, value)
      written[name] = value
    end
  end
  state.urgent = false
end

-- Whether the text is valid inside a JSON string: no control characters, and UTF-8.
local function clean(text)
  local odd = find(text, "[%z\1-\31\128-\255]")
  if not odd then
    return true
  end
  text = gsub(text, "[\194-\223][\128-\191]", " ")
  text = gsub(text, "[\224-\239][\128-\191][\128-\191]", " ")
  text = gsub(text, "[\240-\244][\128-\191][\128-\191][\128-\191]", " ")
  return not find(text, "[%z\1-\31\128-\255]", odd)
end

-- Whether the text can be a JSON object: its strings are closed and its braces balanced.
local function well_formed(text)
  local bare = text
  if find(bare, "\\", 1, true) then
    bare = gsub(bare, "\\.", "")
  end
  bare = gsub(bare, '"[^"]*"', "")
  return find(bare, "^%s*%b{}%s*$") ~= nil and not find(bare, '"', 1, true)
end

-- The quote that closes the string whose first character is at `from`.
local function closing_quote(text, from)
  local quote = find(text, '"', from, true)
  while quote do
    local slashes = 0
    while quote - slashes > from and byte(text, quote - 1 - slashes) == BACKSLASH do
      slashes = slashes + 1
    end
    if slashes % 2 == 0 then
      return quote
    end
    quote = find(text, '"', quote + 1, true)
  end
end

local STRUCTURE = { '"', "{", "}", "[", "]" }
local NONE = math.huge

-- The first quote, brace or bracket at or after `at`. `ahead` keeps the next position of each (0: not searched yet), so that the text
-- is not searched twice.
local function structural(text, at, ahead)
  local first = NONE
  for i = 1, 5 do
    local place = ahead[i]
    if place < at then
      place = find(text, STRUCTURE[i], at, true) or NONE
      ahead[i] = place
    end
    if place < first then
      first = place
    end
  end
  return first
end

-- The number of tokens after a key, which is given with its quotes. nil: there is none; false: it is invalid.
local function number(text, key)
  local at = find(text, key, 1, true)
  local literal = at and match(text, "^%s*:%s*([^%s,}%]]+)", at + #key)
  if not literal or literal == "null" then
    return nil
  end
  local value = tonumber(match(literal, "^%-?%d[%d.eE+-]*$"))
  return value ~= nil and value >= 0 and value < MAX_TOKENS and value % 1 == 0 and value
end

-- Store the counts of one usage object. A count never decreases within one response, unless each of several choices has its own.
local function keep_usage(state, prompt, completion, cached)
  local falls = completion and completion < (state.completion_tokens or 0) or prompt and prompt < (state.prompt_tokens or 0)
  if falls and prompt == 0 and (completion or 0) == 0 then
    return
  end
  state.bad_usage = state.bad_usage or (falls and (state.began or 0) < 2) or nil
  state.prompt_tokens = prompt or state.prompt_tokens
  state.completion_tokens = completion or state.completion_tokens
  state.cached_tokens = cached or (state.cached_tokens and 0)
end

-- Store the length of the audio input, which is given in seconds.
local function take_seconds(state, text)
  local seconds = tonumber(text)
  if seconds and seconds >= 0 and seconds < MAX_TOKENS then
    state.audio_seconds = math.ceil(seconds)
    return true
  end
end

-- Read the counts of one usage object. OpenAI's replace the earlier ones; Anthropic sends them in parts, and does not include
-- cached tokens in its input tokens. Returns whether there are any.
local function take_usage(state, object)
  local prompt, completion = number(object, '"prompt_tokens"'), number(object, '"completion_tokens"')
  local input, output = number(object, '"input_tokens"'), number(object, '"output_tokens"')
  local total, cached = number(object, '"total_tokens"'), number(object, '"cached_tokens"') or nil
  if prompt == false or completion == false or input == false or output == false or total == false then
    state.bad_usage = true
  elseif prompt or completion then
    completion = completion or (total and math.max(0, total - prompt)) or 0
    keep_usage(state, prompt or (total and math.max(0, total - completion)), completion, cached)
  elseif input then
    local reused = number(object, '"cache_read_input_tokens"') or 0
    local whole = input + reused + (number(object, '"cache_creation_input_tokens"') or 0)
    keep_usage(state, whole, output, cached or (reused > 0 and reused) or nil)
  elseif output then
    keep_usage(state, nil, output, state.cached_tokens)
  elseif total then
    state.total_tokens = total
  else
    return take_seconds(state, match(object, '"seconds"%s*:%s*([%d.]+)')) or false
  end
  return true
end

-- Read the counts that rerankers send in `meta` instead of `usage`.
local function take_meta(state, object)
  local tokens = match(object, '"tokens"%s*:%s*(%b{})') or match(object, '"billed_units"%s*:%s*(%b{})')
  return tokens and not state.prompt_tokens and take_usage(state, tokens)
end

-- The code in the gateway's own error body, with which the sidecar or Envoy has replaced the node's.
local OURS = '"type"%s*:%s*"urn:din%-extproc:error:([%w_]+)"'

-- The code or type of an error whose object begins at `at`: never its text.
local function error_code(text, at)
  local code = match(text, '"code"%s*:%s*"([^"\\]+)"', at)
    or match(text, '"type"%s*:%s*"([^"\\]+)"', at)
    or match(text, '"error_type"%s*:%s*"([^"\\]+)"', at)
    or match(text, '"code"%s*:%s*(%d+)', at)
    or "error"
  return sub(gsub(code, "[^%w_.-]", "_"), 1, 64)
end

local function has_any(text, needles)
  for i = 1, #needles do
    if find(text, needles[i], 1, true) then
      return true
    end
  end
end

-- The cause of an error that begins at `at`: "request", "busy" or nil, the node; and whether the request is too long. Phrases take
-- precedence over codes, at any depth: gateways wrap the errors of engines.
local function fault_of(text, at)
  local lower = string.lower(sub(text, at, at + FAULT_BYTES))
  if has_any(lower, TOO_LONG) then
    return "request", true
  end
  local status = match(lower, '"code"%s*:%s*"?(4%d%d)"?%s*[,}]') or match(lower, '"status[_code]*"%s*:%s*"?(4%d%d)"?%s*[,}]')
  if status == "429" or has_any(lower, BUSY) then
    return "busy"
  end
  if NODES[status] then
    return nil
  end
  return (status or has_any(lower, REFUSED)) and "request" or nil
end

local function mask_path(before, path)
  return not find(path, "^/v%d+/") and before .. "(path)" or nil
end

-- The text without addresses and paths, which would reveal the network and the machines behind the gateway.
local function mask(text)
  text = gsub(text, "\\/", "/")
  text = gsub(text, "https?://[^%s,'\"<>\\]+", "(address)")
  text = gsub(text, "%f[%d]%d+%.%d+%.%d+%.%d+%f[%D]:?%d*", "(address)")
  text = gsub(text, "%[%x*:[%x:.]+%]:?%d*", "(address)")
  text = gsub(text, "%f[%w][%w-]+%.[%w.-]+:%d%d+%f[%D]", "(address)")
  text = gsub(text, "localhost:?%d*", "(address)")
  return (gsub(text, "([^%w/<._-])(/[%w_.~+@-]+/[%w_./~+@-]*)", mask_path))
end

local function count(state, size)
  state.deltas = state.deltas + 1
  state.delta_bytes = state.delta_bytes + size
end

-- Count the event if it is the template with another token. Returns whether it is.
local function fits(state, event)
  local before, after = state.before, state.after
  if not before then
    return false
  end
  local open, close = #before + 1, #event - #after + 1
  if close <= open or sub(event, 1, open - 1) ~= before or sub(event, close) ~= after then
    return false
  end
  local quote = find(event, '"', open, true)
  while quote < close and byte(event, quote - 1) == BACKSLASH do
    quote = find(event, '"', quote + 1, true)
  end
  if quote ~= close or byte(event, close - 1) == BACKSLASH or not clean(sub(event, open, close - 1)) then
    return false
  end
  count(state, close - open)
  return true
end

-- Record one token in a channel, its characters at `open` to `close - 1`.
local function see_token(seen, text, open, close)
  if close > open then
    seen.channels, seen.size = seen.channels + 1, seen.size + close - open
    seen.open, seen.close = open, close
    seen.unclean = seen.unclean or not clean(sub(text, open, close - 1))
  end
end

-- Record one other member whose value is a string.
local function see_string(seen, text, key, open, close)
  if close == open then
    return
  elseif key == "finish_reason" then
    seen.finish = sub(gsub(sub(text, open, close - 1), "[^%w_.-]", "_"), 1, 64)
    seen.choice.finished = true
  elseif key == "type" then
    seen.type = sub(text, open, close - 1)
    seen.ending = seen.ending or ENDINGS[seen.type] or seen.ends[seen.type]
  elseif key == "error" then
    seen.error, seen.message = open, sub(text, open - 1, close)
  elseif key == "object" and sub(text, open, close - 1) == "error" then
    seen.error = 1
  elseif key == "code" then
    seen.code = sub(gsub(sub(text, open, close - 1), "[^%w_.-]", "_"), 1, 64)
  elseif key == "message" then
    seen.text = sub(text, open - 1, close)
  end
end

-- Record one member whose value is an object or an array, which begins at `at`.
local function see_container(seen, text, key, at)
  if key == "usage" then
    seen.usage = match(text, "^%b{}", at) or seen.usage
  elseif key == "error" then
    seen.error = find(text, '^{%s*"', at) or seen.error
  elseif key == "tool_calls" then
    seen.tools = find(text, "^%[%s*{", at) ~= nil
  elseif key == "choices" then
    seen.no_choices = find(text, "^%[%s*%]", at) ~= nil
  end
end

-- Record a member of an object that has a schema. Returns the position after it, and the schema of an object there; nil: no JSON.
local function see_member(seen, text, place, key, value)
  local lead = byte(text, value)
  if lead == QUOTE then
    local stop = closing_quote(text, value + 1)
    if stop and place.speaks[key] then
      see_token(seen, text, value + 1, stop)
    elseif stop and place.strings[key] then
      see_string(seen, text, key, value + 1, stop)
    end
    return stop and stop + 1, false
  end
  if lead == BRACE or lead == BRACKET then
    if place.containers[key] then
      see_container(seen, text, key, value)
    end
    return value, place.into[key] or place.others or false
  end
  if key == "index" and place == CHOICE then
    seen.choice.index = match(text, "^%d+", value)
  end
  return value, false
end

-- Record that a choice begins here.
local function see_choice(seen)
  seen.choice = { index = "0" }
  seen.choices = seen.choices or {}
  seen.choices[#seen.choices + 1] = seen.choice
end

-- The position of the value after a string that ends at `stop`; nil: the string is no key.
local function value_of(text, stop)
  local at = stop + 1
  while WHITE[byte(text, at)] do
    at = at + 1
  end
  if byte(text, at) ~= COLON then
    return nil
  end
  repeat
    at = at + 1
  until not WHITE[byte(text, at)]
  return at
end

-- Walk over the structure of a JSON object and record the members that are read. nil: it is no JSON object.
local function look(text, ends)
  local seen = { channels = 0, size = 0, ends = ends }
  local ahead, outer, depth = { 0, 0, 0, 0, 0 }, {}, 0
  local place, inner = false, ROOT -- schemas of the current object or array, and of one that opens here; false: none
  local at = structural(text, 1, ahead)
  while at < NONE do
    local lead = byte(text, at)
    if lead == QUOTE then
      local stop = closing_quote(text, at + 1)
      local value = stop and place and value_of(text, stop)
      if value then
        at, inner = see_member(seen, text, place, sub(text, at + 1, stop - 1), value)
      else
        at = stop and stop + 1
      end
      if not at then
        return nil
      end
    else
      if lead == BRACE or lead == BRACKET then
        depth = depth + 1
        outer[depth], place = place, inner
        inner = lead == BRACKET and place
        if place == CHOICE and lead == BRACE then
          see_choice(seen)
        end
      elseif depth > 0 then
        place = outer[depth]
        depth, inner = depth - 1, place
      end
      at = at + 1
    end
    at = structural(text, at, ahead)
  end
  return seen
end

-- The event's data, its lines joined by the SSE grammar; nil: it has none.
local function data_of(event)
  local lines = {}
  for line in gmatch(gsub(event, "^\239\187\191", ""), "[^\r\n]+") do -- without the byte order mark that may open a stream
    if line == "data" then
      lines[#lines + 1] = ""
    elseif sub(line, 1, 5) == "data:" then
      lines[#lines + 1] = sub(line, byte(line, 6) == SPACE and 7 or 6)
    end
  end
  return lines[1] and table.concat(lines, "\n")
end

-- Track the choices that have begun and those that have finished.
local function follow(state, choices)
  for i = 1, #choices do
    local choice = choices[i]
    local before = state.choices[choice.index]
    if before == nil and state.began < MAX_CHOICES then
      state.choices[choice.index], state.began, before = false, state.began + 1, false
    end
    if choice.finished and before == false then
      state.choices[choice.index], state.finished = true, state.finished + 1
    end
  end
  if state.finish_reason then
    local open = math.max(state.expected, state.began) - state.finished
    state.open_choices = (open > 0 or state.open_choices) and open or nil
  end
end

-- Add the counts of one event. `event` is its text if that is one line, from which the template is made.
local function take(state, seen, event)
  if seen.finish or seen.ending then
    state.finish_reason, state.done = seen.finish or state.finish_reason, seen.ending or state.done
    state.urgent = true
  end
  if seen.choices then
    follow(state, seen.choices)
  end
  local usage = seen.usage and take_usage(state, seen.usage)
  if seen.channels == 0 and not seen.tools then
    state.urgent = state.urgent or usage
    return usage and seen.no_choices
  end
  count(state, seen.size)
  if event and seen.channels == 1 and not seen.finish and not usage then
    local skipped = #event - seen.length
    state.before, state.after = sub(event, 1, seen.open + skipped - 1), sub(event, seen.close + skipped)
  end
  return false
end

-- Whether clients of the dialect can read the error in its current format.
local function readable(state, seen, event)
  local kind = seen.type
  if state.dialect == "responses" then
    return kind == "error" or kind == "response.failed"
  end
  if state.dialect == "messages" then
    return kind == "error" and not seen.message and find(event, "^event:%s*error[\r\n]") ~= nil and seen.error ~= 1
  end
  return seen.error ~= 1 and not seen.message and kind ~= "response.failed"
end

-- The message of an error whose object begins at `at`, as JSON.
local function error_message(text, at)
  local _, open = find(text, '"message"%s*:%s*"', at)
  local close = open and closing_quote(text, open + 1)
  return close and close > open + 1 and sub(text, open, close) or FAILED
end

-- The sentence of an error, at any depth, by which the request is too long, as JSON; nil: there is none.
local function too_long_message(text)
  local bare = gsub(text, '\\+"', '"')
  for sentence in gmatch(bare, '"[%w_]*"%s*:%s*"([^"]*)"') do
    if #sentence > 24 and has_any(string.lower(sentence), TOO_LONG) then
      return '"' .. sub(gsub(sentence, "\\$", ""), 1, 1000) .. '"'
    end
  end
end

-- Record an error in the stream. Returns the event that replaces it; nil: it stays.
local function take_error(state, seen, text, event)
  local code = seen.error ~= 1 and error_code(text, seen.error) or seen.code or seen.type or "error"
  if seen.message then
    code = "error"
  end
  local fault, too_long = fault_of(text, seen.error)
  if too_long then
    code = "context_length_exceeded"
  end
  if not state.error then
    state.fault = fault
  end
  if seen.usage then
    take_usage(state, seen.usage)
  end
  state.error, state.urgent = state.error or code, true
  local real = not too_long or state.dialect == "messages" or find(text, '"context_length_exceeded"', 1, true)
  if real and readable(state, seen, event) then
    local masked = mask(event)
    return masked ~= event and masked or nil
  end
  local message = too_long and too_long_message(text) or seen.message or (seen.error == 1 and seen.text) or error_message(text, seen.error)
  local kind = match(text, '"type"%s*:%s*"([%w_]+)"', seen.error)
  kind = fault == "request" and "invalid_request_error" or (ANTHROPIC[kind] and kind) or "api_error"
  code = too_long and code or (fault == "request" and "invalid_request") or "upstream_error"
  local rewritten = ERRORS[state.dialect](mask(message), code, state, kind)
  return sub(rewritten, 1, -3) -- the event's own blank line closes it
end

-- Read one event. Returns its replacement: nil: it stays; "": it is removed; or other text.
local function read(state, event)
  if fits(state, event) then
    return nil
  end
  local single = sub(event, 1, 5) == "data:" and not find(event, "\n", 1, true) and not find(event, "\r", 1, true)
  local text = single and sub(event, byte(event, 6) == SPACE and 7 or 6) or data_of(event)
  if not text then
    return nil
  end
  if not find(text, "^%s*{") then
    if find(text, "^%s*%[DONE%]%s*$") then
      state.done, state.urgent = true, true
    end
    return nil
  end
  local seen = well_formed(text) and look(text, state.ends)
  if not seen or seen.unclean then
    state.bad_events = (state.bad_events or 0) + 1
    return nil
  end
  if state.dialect == "responses" then
    state.sequence = match(text, '"sequence_number"%s*:%s*(%d+)') or state.sequence
    state.response_id = state.response_id or match(text, '^[^{]*{.-"response"%s*:%s*{[^{}]-"id"%s*:%s*"([%w_-]+)"')
  end
  if not seen.error and (seen.type == "error" or seen.type == "response.failed") then
    seen.error = 1
  end
  if seen.error then
    return take_error(state, seen, text, event)
  end
  seen.length = #text
  if take(state, seen, single and event) and state.strip then
    return ""
  end
  return nil
end

-- The end of the first event at or after `from`: its last byte, and the last byte of the blank line that closes it.
local function boundary(text, from, has_cr)
  if not has_cr then
    local at = find(text, "\n\n", from, true)
    if at then
      return at - 1, at + 1
    end
    return nil
  end
  local at = find(text, "[\r\n][\r\n]", from)
  while at do
    local blank = at + 1
    if byte(text, at) == CR and byte(text, blank) == LF then
      blank = blank + 1
    end
    local first = byte(text, blank)
    if first == CR or first == LF then
      if first == CR and byte(text, blank + 1) == LF then
        return at - 1, blank + 1
      end
      return at - 1, blank
    end
    at = find(text, "[\r\n][\r\n]", blank)
  end
end

-- Read the next bytes of an event stream. Returns the bytes for the client: complete events, without those that are removed.
local function feed_events(state, bytes)
  local held = #state.carry
  local text = held > 0 and state.carry .. bytes or bytes
  local position, start, out = 1, 1, nil
  if state.cut_cr and byte(text, 1) == LF then -- the other half of the last event's CRLF
    position = 2
    start = state.cut_cr == "dropped" and 2 or 1
  end
  local cut_cr = nil
  local has_cr = find(text, "\r", 1, true)
  local stop, last = boundary(text, math.max(position, held - 2), has_cr)
  while stop do
    local instead = nil
    if state.overlong then
      state.overlong = false
    else
      instead = read(state, sub(text, position, stop))
    end
    if instead then
      out = (out or "") .. sub(text, start, position - 1) .. instead
      start = instead == "" and last + 1 or stop + 1
    end
    if last == #text and byte(text, last) == CR then
      cut_cr = instead == "" and "dropped" or "kept"
    end
    position = last + 1
    stop, last = boundary(text, position, has_cr)
  end
  local rest = sub(text, position)
  if #rest > MAX_EVENT then
    if not state.overlong then
      state.overlong, state.bad_events = true, (state.bad_events or 0) + 1
      state.unread, state.urgent = true, true
    end
    position, rest = #text + 1, ""
  end
  state.carry, state.cut_cr = rest, cut_cr
  local passed = sub(text, start, position - 1)
  return out and out .. passed or passed
end

-- Read the rest at the end of a stream: no event by the grammar, but some engines omit the last blank line. Returns the last bytes for
-- the client: the rest itself, or an error event if the stream was cut off.
local function end_events(state)
  local rest, bad = state.carry, state.bad_events
  if rest ~= "" and not state.overlong then
    read(state, (gsub(rest, "[\r\n]+$", "")))
    state.bad_events = bad
  end
  if state.good and not (complete(state) or state.error or state.unread) then
    return ERRORS[state.dialect](CUT_OFF, "upstream_truncated", state, "api_error")
  end
  return rest
end

-- Members of a JSON body that hold tokens or seconds, and the functions that read them.
local COUNTS = {
  { key = '"usage"', whole = '^"usage"%s*:%s*(%b{})', odd = { '^"usage"%s*[^%s:]', '^"usage"%s*:%s*[^%s{]' }, take = take_usage },
  { key = '"duration"', whole = '^"duration"%s*:%s*"?([%d.]+)"?%s*,', odd = { '^"duration"%s*[^%s:]', '^"duration"%s*:%s*[^%s%d."]' }, take = take_seconds },
  { key = '"meta"', whole = '^"meta"%s*:%s*(%b{})', odd = { '^"meta"%s*[^%s:]', '^"meta"%s*:%s*[^%s{]' }, take = take_meta },
}

-- The same by the first byte of the key's name: most members are told apart by it.
local COUNT_BY_LEAD = {}
for _, member in ipairs(COUNTS) do
  COUNT_BY_LEAD[byte(member.key, 2)] = member
end

-- Whether the text can be the beginning of such a member.
local function may_become(text, at, member)
  local key, odd = member.key, member.odd
  if #text - at >= MAX_USAGE or sub(text, at, at + #key - 1) ~= sub(key, 1, #text - at + 1) then
    return false
  end
  return not find(text, odd[1], at) and not find(text, odd[2], at)
end

-- Record that the text ends inside a string whose first character in it is at `from`.
local function cut_string(state, text, from)
  local slashes = 0
  while #text - slashes >= from and byte(text, #text - slashes) == BACKSLASH do
    slashes = slashes + 1
  end
  state.quoted, state.escaped = true, slashes % 2 == 1
end

-- Skip a string, or read a member that holds counts. Returns the position after it; nil: the text ends before it does.
local function pass_string(state, text, at, depth)
  if depth == 1 and at == #text then
    state.tail = '"'
    return nil
  end
  local member = depth == 1 and COUNT_BY_LEAD[byte(text, at + 1)]
  if member then
    local _, last, object = find(text, member.whole, at)
    if object then
      member.take(state, object)
      state.urgent = true
      return last + 1
    end
    if may_become(text, at, member) then
      state.tail = sub(text, at)
      return nil
    end
  end
  local stop = closing_quote(text, at + 1)
  if stop then
    return stop + 1
  end
  cut_string(state, text, at + 1)
end

local function pass_on(_, bytes)
  return bytes
end

-- Read the next bytes of a JSON body: search its members for usage, and keep a possible beginning of one for the next chunk.
local function feed_json(state, bytes)
  if #state.head < HEAD then
    state.head = state.head .. sub(bytes, 1, HEAD - #state.head)
  end
  local text = state.tail ~= "" and state.tail .. bytes or bytes
  local at, depth, ahead, steps = 1, state.depth, { 0, 0, 0, 0, 0 }, 0
  state.tail = ""
  if state.quoted then
    local from = state.escaped and 2 or 1
    local stop = closing_quote(text, from)
    if not stop then
      cut_string(state, text, from)
      return bytes
    end
    at, state.quoted = stop + 1, false
  end
  while at do
    at, steps = structural(text, at, ahead), steps + 1
    if at == NONE then
      break
    end
    local lead = byte(text, at)
    if lead == QUOTE then
      at = pass_string(state, text, at, depth)
    else
      depth = depth + ((lead == BRACE or lead == BRACKET) and 1 or -1)
      at = at + 1
    end
  end
  state.depth, state.structure = depth, state.structure + steps
  if state.structure > MAX_STRUCTURE then
    state.feed = pass_on
  end
  return bytes
end

local function end_json(state)
  state.done = true
  local head = state.head
  state.error = not state.good and match(head, OURS) or nil
  if state.error then
    return ""
  end
  if find(head, '^%s*{%s*"error"%s*:%s*{%s*"') or find(head, '^%s*{%s*"error"%s*:%s*"[^"]') or find(head, '^%s*{%s*"object"%s*:%s*"error"') then
    local fault, too_long = fault_of(head, 1)
    state.error, state.fault = too_long and "context_length_exceeded" or error_code(head, 1), fault
  end
  return ""
end

local function open_state(handle, content_type, known)
  local state = { handle = handle, written = {}, urgent = false }
  if find(content_type, "text/event-stream", 1, true) then
    state.feed, state.finish = feed_events, end_events
    state.carry, state.strip = "", known.strip_usage == true
    state.dialect = ERRORS[known.dialect] and known.dialect or "chat"
    state.deltas, state.delta_bytes = 0, 0
    state.choices, state.began, state.finished, state.expected = {}, 0, 0, known.choices or 1
    state.ends = {}
    for kind in gmatch(known.ends or "", "%S+") do
      state.ends[kind] = true
    end
  elseif find(content_type, "json", 1, true) and not find(content_type, "ndjson", 1, true) then
    state.feed, state.finish = feed_json, end_json
    state.carry, state.head, state.tail = "", "", ""
    state.depth, state.structure = 0, 0
  else
    return nil
  end
  return state
end

-- Record the time if there are more deltas than `before`: once for all that arrived together.
local function note_time(state, before)
  if state.deltas ~= before then
    state.passed = state.handle:timestampString(EnvoyTimestampResolution.MICROSECOND)
    state.first_token_us = state.first_token_us or tonumber(state.passed)
  end
end

-- Read one chunk, and write the metadata that it changed. Returns the bytes for the client.
local function step(state, bytes)
  local before = state.deltas
  local out = state.feed(state, bytes)
  note_time(state, before)
  if state.urgent or state.deltas ~= state.written.deltas then
    write(state)
  end
  return out
end

-- Read the rest at the end of the response, and write the metadata. Returns the last bytes for the client.
local function close(state)
  local before = state.deltas
  local rest = state.finish(state)
  note_time(state, before)
  write(state)
  return rest
end

-- Replace a web page by the error body.
local function replace_page(handle, headers, known)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "error", "upstream_error")
  headers:replace(":status", "502")
  headers:replace("content-type", "application/json")
  headers:remove("content-length")
  headers:remove("content-encoding")
  local path = match(known.labels or "", '"operation":"([%w/_]+)"') or ""
  local trace_id = headers:get("x-din-trace-id") or ""
  local text = known.dialect == "messages" and string.format(ANTHROPIC_PAGE, NO_ANSWER, trace_id)
    or string.format(PAGE, NO_ANSWER, path, trace_id, NO_ANSWER)
  for chunk in handle:bodyChunks() do
    chunk:setBytes(text)
    text = ""
  end
end

-- The cost of a response in the currency, equal to that of accounting; nil: accounting will estimate it, or another node has answered.
-- Price: per prompt token, cached prompt token and output token and once, in 10^-12 of the currency; the largest valid token counts of
-- prompt and output.
local function cost_of(state, price, size)
  local input, cached_input, output, once, most_prompt, most_output = match(price, "^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$")
  local prompt, completion, cached = state.prompt_tokens, state.completion_tokens, state.cached_tokens or 0
  if not most_output or not prompt or not completion or prompt + completion == 0 or state.bad_usage or state.error then
    return nil
  end
  if prompt > tonumber(most_prompt) or completion > tonumber(most_output) or completion > size + UNSEEN then
    return nil
  end
  local sum = (prompt - cached) * tonumber(input) + cached * tonumber(cached_input) + completion * tonumber(output) + tonumber(once)
  local units = math.floor((sum + 500) / 1000)
  local decimals = gsub(string.format("%09d", units % 1e9), "^(%d%d%d-)0*$", "%1")
  return string.format("%d.%s", math.floor(units / 1e9), decimals)
end

-- Buffer a response and set its cost header.
local function add_cost(handle, state, price)
  local body = handle:body()
  local size = body and body:length() or 0
  local ok, fault = pcall(function()
    step(state, size > 0 and body:getBytes(0, size) or "")
    close(state)
    local cost = cost_of(state, price, size)
    if cost then
      handle:headers():replace("x-din-cost", cost)
    end
  end)
  if not ok then
    handle:logErr("usage.lua stopped counting: " .. tostring(fault))
  end
end

function envoy_on_response(handle)
  local metadata = handle:streamInfo():dynamicMetadata()
  local known = metadata:get(NAMESPACE) or metadata:get(PERMITS)
  if not known or not known.request_id or known.refusal then
    return
  end
  local headers = handle:headers()
  local content_type = string.lower(headers:get("content-type") or "")
  if find(content_type, "text/html", 1, true) and headers:get(":status") == "200" then
    return replace_page(handle, headers, known)
  end
  local encoding = headers:get("content-encoding")
  if encoding and encoding ~= "" and encoding ~= "identity" then
    handle:streamInfo():dynamicMetadata():set(NAMESPACE, "encoded", true)
    return
  end
  local state = open_state(handle, content_type, known)
  if not state then
    return
  end
  if state.feed == feed_events then
    headers:remove("content-length") -- events may be removed
  end
  state.good = headers:get(":status") == "200"
  if known.price and not known.moved_to and state.good and state.feed == feed_json then
    return add_cost(handle, state, known.price)
  end
  local last = nil
  for chunk in handle:bodyChunks() do
    last = chunk
    local size = chunk:length()
    if size > 0 then
      local bytes = chunk:getBytes(0, size)
      local carry = state.carry
      local ok, out = pcall(step, state, bytes)
      if not ok then
        handle:logErr("usage.lua stopped counting: " .. tostring(out))
        if carry ~= "" then
          chunk:setBytes(carry .. bytes)
        end
        return
      end
      if out ~= bytes then
        chunk:setBytes(out)
      end
    end
  end
  local ok, rest = pcall(close, state)
  if not ok then
    handle:logErr("usage.lua lost the last counts: " .. tostring(rest))
    rest = state.carry
  end
  if rest ~= "" and last then -- the last chunk can still be changed, unless trailers ended the stream
    pcall(function() last:setBytes(last:getBytes(0, last:length()) .. rest) end)
  end
end
