-- keys: tokens once
-- arguments: token at text name seconds

local before = recalled() or recalled_as(name, once)
if before then return before end
if redis.call('HEXISTS', tokens, token) == 1 then return {'taken'} end
redis.call('HSET', tokens, token, (at ~= '' and at or now) .. ' ' .. redis.call('HLEN', tokens) .. ' ' .. text)
return remember_as(name, once, seconds, {'ok'})
