-- keys: tokens revoked
-- arguments: token

if redis.call('HEXISTS', tokens, token) == 0 then return {'unknown'} end
redis.call('HSETNX', revoked, token, now)
return {'ok'}
