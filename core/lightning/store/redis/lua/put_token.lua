-- keys: tokens
-- arguments: token at text

local before = recalled()
if before then return before end
if redis.call('HEXISTS', tokens, token) == 1 then return {'taken'} end
redis.call('HSET', tokens, token, (at ~= '' and at or now) .. ' ' .. redis.call('HLEN', tokens) .. ' ' .. text)
return remember({'ok'})
