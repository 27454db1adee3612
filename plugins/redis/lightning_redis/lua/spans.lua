-- keys: standing
-- arguments: most count
-- For each span: rollout, attempt, the place of its attempt, span id, text. A span that comes again is there already.

local current, stored = {}, 0
for i = 0, tonumber(count) - 1 do
  local at = REST + i * 5
  local rollout, attempt = ARGV[at + 1], tonumber(ARGV[at + 2])
  if current[rollout] == nil then
    local position = stand(standing, rollout)
    current[rollout] = position and position.attempt or 0
  end
  if attempt > 0 and attempt == current[rollout] then
    local spans, id = KEYS[MORE + tonumber(ARGV[at + 3])], ARGV[at + 4]
    if redis.call('HEXISTS', spans, id) == 1 then
      stored = stored + 1
    elseif redis.call('HLEN', spans) < tonumber(most) then
      redis.call('HSET', spans, id, ARGV[at + 5])
      stored = stored + 1
    end
  end
end
return {'ok', stored}
