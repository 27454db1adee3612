-- keys: standing attempts held once
-- arguments: worker count name seconds
-- Then the runs that the worker works for, as far as the caller knows; each has four keys: pending, running, leases, changes.

local before = recalled() or recalled_as(name, once)
if before then return before end

local places = {}
for i = 1, tonumber(count) do
  places[ARGV[REST + i]] = MORE + (i - 1) * 4
end

local found = {}
for _, member in ipairs(redis.call('ZRANGEBYLEX', held, '[' .. worker .. '\0', '(' .. worker .. '\1')) do
  local rollout = string.sub(member, #worker + 2)
  local position = stand(standing, rollout)
  if position and position.status == 'running' and position.worker == worker then
    if not places[position.run] then return {'elsewhere'} end
    found[#found + 1] = {rollout, position}
  end
end
local streams = {}
for _, each in ipairs(found) do
  local rollout, position = each[1], each[2]
  local place = places[position.run]
  close(attempts, rollout, position, 'released', {})
  let_go(KEYS[place + 3], held, rollout, position)
  move(rollout, KEYS[place + 2], KEYS[place + 1])
  position.status, position.spent, position.worker = 'pending', position.spent - 1, nil
  settle(standing, rollout, position)
  streams[place] = true
end
for place in pairs(streams) do
  changed(KEYS[place + 4])
end
return remember_as(name, once, seconds, {'ok', #found})
