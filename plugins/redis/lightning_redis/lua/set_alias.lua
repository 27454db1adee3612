-- keys: versions aliases moves once
-- arguments: alias version name seconds
-- A move is its version, its time and the place of the move to return to.

local before = recalled() or recalled_as(name, once)
if before then return before end
if redis.call('HEXISTS', versions, version) == 0 then return {'unknown'} end
local last = redis.call('LINDEX', moves, -1)
if last then
  local target, at = string.match(last, '^(%S+) (%S+) ')
  if target == version then return remember_as(name, once, seconds, {'ok', target, at}) end
end
redis.call('RPUSH', moves, version .. ' ' .. now .. ' ' .. (redis.call('LLEN', moves) - 1))
redis.call('HSET', aliases, alias, version .. ' ' .. now)
return remember_as(name, once, seconds, {'ok', version, now})
