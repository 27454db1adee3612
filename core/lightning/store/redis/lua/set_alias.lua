-- keys: versions aliases moves
-- arguments: alias version
-- A move is its version, its time and the place of the move to return to.

local before = recalled()
if before then return before end
if redis.call('HEXISTS', versions, version) == 0 then return {'unknown'} end
local last = redis.call('LINDEX', moves, -1)
if last then
  local target, at = string.match(last, '^(%S+) (%S+) ')
  if target == version then return {'ok', target, at} end
end
redis.call('RPUSH', moves, version .. ' ' .. now .. ' ' .. (redis.call('LLEN', moves) - 1))
redis.call('HSET', aliases, alias, version .. ' ' .. now)
return remember({'ok', version, now})
