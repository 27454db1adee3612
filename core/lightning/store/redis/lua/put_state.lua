-- keys: state changes
-- arguments: key text

local before = recalled()
if before then return before end
redis.call('HSET', state, key, text)
changed(changes)
return remember({'ok'})
