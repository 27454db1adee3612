-- keys: standing calls
-- arguments: rollout attempt seq width was value
-- The answer of a stored call, whose value begins with the digest `was`, did not arrive: it has this value from now on.

local before = recalled()
if before then return before end

local stored, text = redis.call('HGET', calls, seq), redis.call('HGET', standing, rollout)
if not stored or string.sub(stored, 1, width) ~= was then return {'changed'} end
if not is_running(cjson.decode(text), attempt) then return {'refused', text} end
redis.call('HSET', calls, seq, value)
return remember({'ok'})
