-- keys: standing steps proofs changes
-- arguments: run step digest at text count limit
-- Then rollout, attempt and '1' where it is declared as reused, of each that was trained; `limit` is in how many steps beyond
-- its first. The digest of the step tells a call that comes again.

local known = redis.call('HGET', proofs, step)
if known == digest then return {'ok'} end
if known then return {'conflict', known} end

local found = {}
for i = 0, tonumber(count) - 1 do
  local rollout, attempt, again = ARGV[REST + i * 3 + 1], ARGV[REST + i * 3 + 2], ARGV[REST + i * 3 + 3] == '1'
  local position = found[rollout] or stand(standing, rollout)
  if not position then return {'unknown', rollout} end
  local trainable = position.status == 'succeeded' or (position.status == 'failed' and position.fault == 'policy')
  local before = position.trained and tonumber(position.trained) < tonumber(step) and not found[rollout]
  local fits = again and before and (position.steps or 1) <= tonumber(limit) or not again and not position.trained
  if position.run ~= run or not trainable or position.attempt ~= tonumber(attempt) or not fits then
    return {'untrainable', i, cjson.encode(position)}
  end
  if again then position.steps = (position.steps or 1) + 1 else position.trained = step end
  found[rollout] = position
end
for rollout, position in pairs(found) do
  settle(standing, rollout, position)
end
redis.call('HSET', steps, step, (at ~= '' and at or now) .. ' ' .. text)
redis.call('HSET', proofs, step, digest)
changed(changes)
return {'ok'}
