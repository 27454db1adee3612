-- keys: standing steps proofs changes
-- arguments: run step digest at text count
-- Then rollout and attempt of each that was trained. The digest of the step tells a call that comes again.

local known = redis.call('HGET', proofs, step)
if known == digest then return {'ok'} end
if known then return {'conflict', known} end

local found = {}
for i = 0, tonumber(count) - 1 do
  local rollout, attempt = ARGV[REST + i * 2 + 1], ARGV[REST + i * 2 + 2]
  local position = found[rollout] or stand(standing, rollout)
  if not position then return {'unknown', rollout} end
  local trainable = position.status == 'succeeded' or (position.status == 'failed' and position.fault == 'policy')
  if position.run ~= run or not trainable or position.attempt ~= tonumber(attempt) or position.trained then
    return {'untrainable', i, cjson.encode(position)}
  end
  position.trained = step
  found[rollout] = position
end
for rollout, position in pairs(found) do
  settle(standing, rollout, position)
end
redis.call('HSET', steps, step, (at ~= '' and at or now) .. ' ' .. text)
redis.call('HSET', proofs, step, digest)
changed(changes)
return {'ok'}
