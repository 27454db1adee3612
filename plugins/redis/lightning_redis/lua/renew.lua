-- keys: standing leases
-- arguments: rollout attempt worker ttl
-- Coming twice, it prolongs twice: nothing needs to be remembered.

local text = redis.call('HGET', standing, rollout)
if not text then return {'unknown'} end
local position = cjson.decode(text)
if not is_running(position, attempt) or position.worker ~= worker then return {'refused', text} end
local till = string.format('%.6f', tonumber(now) + tonumber(ttl))
redis.call('ZADD', leases, till, rollout)
return {'ok', till}
