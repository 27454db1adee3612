-- keys: aliases moves once
-- arguments: alias name seconds
-- The place that the earlier move would have returned to is taken over, so that rolling back again goes on.

local before = recalled() or recalled_as(name, once)
if before then return before end
local last = redis.call('LINDEX', moves, -1)
if not last then return {'unknown'} end
local target, place = string.match(last, '^(%S+) %S+ (%S+)$')
if tonumber(place) < 0 then return {'first', target} end
local version, further = string.match(redis.call('LINDEX', moves, place), '^(%S+) %S+ (%S+)$')
redis.call('RPUSH', moves, version .. ' ' .. now .. ' ' .. further)
redis.call('HSET', aliases, alias, version .. ' ' .. now)
return remember_as(name, once, seconds, {'ok', version, now})
