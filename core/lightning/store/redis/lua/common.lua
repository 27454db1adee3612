-- What every script begins with. A script checks everything before it writes anything: Redis undoes nothing.

local clock = redis.call('TIME')
local now = string.format('%d.%06d', clock[1], clock[2])

-- What this very call was answered before, when it comes again because the answer was lost; nil when it is new.
local function recalled()
  local text = redis.call('HGET', answers, ARGV[1])
  return text and cmsgpack.unpack(text) or nil
end

-- Answer, and know the answer should the call come again. The client drops what it needs no more, or else time does.
local function remember(answer)
  redis.call('HSET', answers, ARGV[1], cmsgpack.pack(answer))
  if redis.call('HLEN', answers) == 1 then
    redis.call('EXPIRE', answers, 3600)
  end
  return answer
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
