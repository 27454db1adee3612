-- keys: runs
-- arguments: run at text

if redis.call('HEXISTS', runs, run) == 0 then
  redis.call('HSET', runs, run, (at ~= '' and at or now) .. ' ' .. redis.call('HLEN', runs) .. ' ' .. text)
end
return {'ok', redis.call('HGET', runs, run)}
