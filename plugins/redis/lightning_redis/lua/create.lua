-- keys: counter standing columns uses
-- arguments: count
-- For each rollout: id, run, max_attempts, columns, uses, and the places of its lists: all, pending, step, changes.

local before = recalled()
if before then return before end

local fresh, taken = {}, {}
for i = 0, tonumber(count) - 1 do
  local at = REST + i * 9
  local rollout, run = ARGV[at + 1], ARGV[at + 2]
  local there = taken[rollout]
  if not there then
    local position = stand(standing, rollout)
    there = position and position.run
  end
  if not there then
    taken[rollout] = run
    fresh[#fresh + 1] = at
  elseif there ~= run then
    return {'elsewhere', i}
  end
end

local streams = {}
for _, at in ipairs(fresh) do
  local rollout = ARGV[at + 1]
  local position = {run = ARGV[at + 2], status = 'pending', attempt = 0, spent = 0, max = tonumber(ARGV[at + 3])}
  if ARGV[at + 5] ~= '' then position.uses = ARGV[at + 5] end
  local n = redis.call('INCR', counter)
  redis.call('HSET', columns, rollout, ARGV[at + 4])
  settle(standing, rollout, position)
  for place = 6, 8 do
    redis.call('ZADD', KEYS[MORE + tonumber(ARGV[at + place])], n, rollout)
  end
  tally(uses, position, 'rollouts')
  streams[ARGV[at + 9]] = true
end
for place in pairs(streams) do
  changed(KEYS[MORE + tonumber(place)])
end
if #fresh == 0 then return {'ok', 0} end
return remember({'ok', #fresh})
