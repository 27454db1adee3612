-- What every script begins with. A script checks everything before it writes anything: Redis undoes nothing.

local clock = redis.call('TIME')
local now = string.format('%d.%06d', clock[1], clock[2])

-- The client has given up its connections before the one it uses now. What it had sent over them may still be on its way,
-- and comes when the same call was answered or given up long ago: it must do nothing. Nobody hears this answer.
local noted = redis.call('HMGET', answers, 'connection', 'batch', call)
if noted[1] and tonumber(noted[1]) > tonumber(connection) then return {'late'} end
if noted[1] ~= connection then
  redis.call('HSET', answers, 'connection', connection)
  redis.call('EXPIRE', answers, 3600)
end

-- What this very call was answered before, when it comes again because the answer was lost; nil when it is new.
local function recalled()
  return noted[2] == batch and noted[3] and cmsgpack.unpack(noted[3]) or nil
end

-- Answer, and know the answer should the call come again. What earlier batches were answered is of no more use.
local function remember(answer)
  if noted[2] ~= batch then
    redis.call('DEL', answers)
    redis.call('HSET', answers, 'connection', connection, 'batch', batch)
    redis.call('EXPIRE', answers, 3600)
  end
  redis.call('HSET', answers, call, cmsgpack.pack(answer))
  return answer
end

-- The same for a call that its caller has named, whoever sends it; `kept` is the key of its answer.
local function recalled_as(name, kept)
  local answer = name ~= '' and redis.call('GET', kept)
  return answer and cmsgpack.unpack(answer) or nil
end

local function remember_as(name, kept, seconds, answer)
  if name ~= '' then redis.call('SET', kept, cmsgpack.pack(answer), 'EX', seconds) end
  return remember(answer)
end

local function stand(standing, rollout)
  local text = redis.call('HGET', standing, rollout)
  return text and cjson.decode(text) or nil
end

local function settle(standing, rollout, position)
  redis.call('HSET', standing, rollout, cjson.encode(position))
end

local function is_running(position, attempt)
  return position.status == 'running' and position.attempt == tonumber(attempt)
end

-- Put a rollout from the list of one status into that of another.
local function move(rollout, from, to)
  redis.call('ZADD', to, redis.call('ZSCORE', from, rollout), rollout)
  redis.call('ZREM', from, rollout)
end

-- Nobody runs the rollout any more.
local function let_go(leases, held, rollout, position)
  redis.call('ZREM', leases, rollout)
  redis.call('ZREM', held, position.worker .. '\0' .. rollout)
end

-- Keep how an attempt ended.
local function close(attempts, rollout, position, ending, record)
  record.worker = position.worker
  record.leased_at = position.leased_at
  record.ended_at = now
  record.ending = ending
  redis.call('HSET', attempts, rollout .. ':' .. position.attempt, cjson.encode(record))
end

local function tally(uses, position, what)
  if position.uses then
    redis.call('HINCRBY', uses, what .. ' ' .. position.uses, 1)
  end
end

local function changed(changes)
  redis.call('XADD', changes, 'MAXLEN', 1, '*', 'at', now)
end
