-- keys: state changes once
-- arguments: key text name seconds

local before = recalled() or recalled_as(name, once)
if before then return before end
redis.call('HSET', state, key, text)
changed(changes)
return remember_as(name, once, seconds, {'ok'})
