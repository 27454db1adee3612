-- keys: metrics once
-- arguments: step count name seconds
-- Then name and value of each.

local before = recalled() or recalled_as(name, once)
if before then return before end
for i = 0, tonumber(count) - 1 do
  redis.call('HSET', metrics, step .. ':' .. ARGV[REST + i * 2 + 1], ARGV[REST + i * 2 + 2] .. ' ' .. now)
end
return remember_as(name, once, seconds, {'ok'})
