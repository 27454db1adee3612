-- keys: standing columns attempts labels uses held pending running succeeded failed cancelled leases changes
-- arguments: rollout attempt digest reward rewards fault error seconds tool_events step_rewards named excused step_states extras
-- The digest of the outcome tells a call that comes again. `excused` is how many attempts may have been given back before this
-- one is spent.

local text = redis.call('HGET', standing, rollout)
if not text then return {'unknown'} end
local place = rollout .. ':' .. attempt
local ended = redis.call('HGET', attempts, place)
if ended and cjson.decode(ended).digest == digest then
  return {'ok', redis.call('HGET', columns, rollout), text}
end

local position = cjson.decode(text)
if not is_running(position, attempt) then return {'refused', text} end

close(attempts, rollout, position, fault ~= '' and fault or 'reward',
  {digest = digest, tool_events = tool_events, step_rewards = step_rewards,
   step_states = step_states, extras = extras})
if named ~= '{}' then redis.call('HSET', labels, place, named) end
let_go(leases, held, rollout, position)
if fault == '' then
  position.status = 'succeeded'
  move(rollout, running, succeeded)
  tally(uses, position, 'scored')
  if position.uses then
    local field = 'reward ' .. position.uses
    local sum = tonumber(redis.call('HGET', uses, field) or '0') + tonumber(reward)
    redis.call('HSET', uses, field, string.format('%.17g', sum))
  end
elseif fault == 'infrastructure' and position.attempt - position.spent < tonumber(excused) then
  position.status, position.spent = 'pending', position.spent - 1
  move(rollout, running, pending)
elseif fault == 'infrastructure' and position.spent < position.max then
  position.status = 'pending'
  move(rollout, running, pending)
elseif fault == 'cancelled' then
  position.status = 'cancelled'
  move(rollout, running, cancelled)
else
  position.status = 'failed'
  move(rollout, running, failed)
  tally(uses, position, 'failed')
end
position.worker = nil
position.reward = reward ~= '' and reward or nil
position.rewards, position.fault, position.error, position.seconds = rewards, fault, error, seconds
text = cjson.encode(position)
redis.call('HSET', standing, rollout, text)
changed(changes)
return {'ok', redis.call('HGET', columns, rollout), text}
