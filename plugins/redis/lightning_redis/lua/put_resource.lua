-- keys: kinds versions contents
-- arguments: name kind digest text
-- Content that comes again is the version that it is.

local kept = redis.call('HGET', kinds, name)
if kept and kept ~= kind then return {'kind', kept} end
local version = redis.call('HGET', contents, digest)
if not version then
  version = redis.call('HLEN', versions) + 1
  redis.call('HSET', kinds, name, kind)
  redis.call('HSET', contents, digest, version)
  redis.call('HSET', versions, version, now .. ' ' .. text)
end
return {'ok', tonumber(version), redis.call('HGET', versions, version)}
