-- keys: standing attempts labels all roots
-- arguments: newest count
-- A group loses its calls, unless one of its rollouts has not ended. Rollouts of its run that were created after the one with
-- the number `newest` may be of the group as well: their creation says nothing of groups, so the caller looks at them first.
-- For each rollout of the group: its name, how many attempts it had; of each attempt the keys of its calls and of its spans.

if redis.call('ZCOUNT', all, '(' .. newest, '+inf') > 0 then return {'grown'} end

local places = {}
for i = 0, tonumber(count) - 1 do
  local rollout, seen = ARGV[REST + i * 2 + 1], tonumber(ARGV[REST + i * 2 + 2])
  local position = stand(standing, rollout)
  local ended = position and position.status ~= 'pending' and position.status ~= 'running'
  if not ended or position.attempt ~= seen then return {'kept'} end
  for attempt = 1, seen do places[#places + 1] = rollout .. ':' .. attempt end
end

redis.call('DEL', roots)
for i = MORE + 1, #KEYS do
  redis.call('DEL', KEYS[i])
end
for _, place in ipairs(places) do
  redis.call('HDEL', labels, place)
  local text = redis.call('HGET', attempts, place)
  if text then
    local record = cjson.decode(text)
    record.tool_events, record.step_states, record.extras = '[]', '[]', ''
    redis.call('HSET', attempts, place, cjson.encode(record))
  end
end
return {'ok'}
