-- keys: state changes
-- arguments: key text
-- Coming again, it finds what it kept.

if redis.call('HSETNX', state, key, text) == 1 then changed(changes) end
return {'ok', redis.call('HGET', state, key)}
