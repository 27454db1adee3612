-- keys: standing columns attempts uses held pending running failed leases changes once
-- arguments: worker limit ttl name seconds
-- What is remembered are the attempts that began: should one have been lost meanwhile, it is not given a second time. Those
-- that are given again last for another `ttl`.

local till = string.format('%.6f', tonumber(now) + tonumber(ttl))

local function give(begun)
  local found = {'ok', till}
  for i = 1, #begun, 2 do
    local position = stand(standing, begun[i])
    if position and is_running(position, begun[i + 1]) then
      redis.call('ZADD', leases, till, begun[i])
      found[#found + 1] = redis.call('HGET', columns, begun[i])
      found[#found + 1] = redis.call('HGET', standing, begun[i])
    end
  end
  return found
end

local before = recalled()
if before then return give(before) end
before = recalled_as(name, once)
if before then
  local found = give(before)
  if #found > 2 then return found end
end
limit = tonumber(limit)
if limit == 0 and name ~= '' then return {'ok', till} end

local ready, spent = {}, {}
for _, rollout in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
  local position = stand(standing, rollout)
  if position.spent >= position.max then
    spent[#spent + 1] = {rollout, position}
  else
    ready[#ready + 1] = {tonumber(redis.call('ZSCORE', running, rollout)), rollout, position}
  end
end
if limit > 0 then
  local fresh = redis.call('ZRANGE', pending, 0, limit - 1, 'WITHSCORES')
  for i = 1, #fresh, 2 do
    ready[#ready + 1] = {tonumber(fresh[i + 1]), fresh[i], stand(standing, fresh[i])}
  end
end
table.sort(ready, function(a, b) return a[1] < b[1] end)

for _, each in ipairs(spent) do
  local rollout, position = each[1], each[2]
  close(attempts, rollout, position, 'expired', {})
  let_go(leases, held, rollout, position)
  move(rollout, running, failed)
  position.error = "the lease of worker '" .. position.worker .. "' expired on attempt " .. position.attempt
    .. ', the last one allowed'
  position.status, position.fault, position.worker = 'failed', 'infrastructure', nil
  settle(standing, rollout, position)
  tally(uses, position, 'failed')
end
if #spent > 0 then changed(changes) end

local begun = {}
for i = 1, math.min(limit, #ready) do
  local rollout, position = ready[i][2], ready[i][3]
  if position.status == 'running' then
    close(attempts, rollout, position, 'expired', {})
    let_go(leases, held, rollout, position)
  else
    move(rollout, pending, running)
  end
  position.status, position.attempt, position.spent = 'running', position.attempt + 1, position.spent + 1
  position.worker, position.leased_at = worker, now
  position.fault, position.error, position.seconds = nil, nil, nil
  settle(standing, rollout, position)
  redis.call('ZADD', leases, till, rollout)
  redis.call('ZADD', held, 0, worker .. '\0' .. rollout)
  begun[#begun + 1] = rollout
  begun[#begun + 1] = position.attempt
end
if #begun == 0 then return {'ok', till} end
return give(remember_as(name, once, seconds, begun))
