-- keys: standing
-- arguments: width room count
-- A value begins with its digest, which has `width` bytes.
-- For each call: rollout, attempt, seq, the place of its attempt, digest, value; the place, seq and digest of its parent; the
-- place of the roots of its group, its name there. Place 0: there is none.

local FIELDS = 11

local before = recalled()
if before then return before end

local texts, seen, fresh = {}, {}, {}
for i = 0, tonumber(count) - 1 do
  local at = REST + i * FIELDS
  local rollout, attempt, seq, place, digest = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  local stored = seen[place .. ':' .. seq] or redis.call('HGET', KEYS[MORE + tonumber(place)], seq)
  if stored then
    if string.sub(stored, 1, width) ~= digest then return {'conflict', i, stored} end
  else
    local text = texts[rollout] or redis.call('HGET', standing, rollout)
    if not text then return {'unknown', i} end
    texts[rollout] = text
    if not is_running(cjson.decode(text), attempt) then return {'refused', i, text} end
    local parent = ARGV[at + 7]
    if parent ~= '0' then
      local known = seen[parent .. ':' .. ARGV[at + 8]]
        or redis.call('HGET', KEYS[MORE + tonumber(parent)], ARGV[at + 8])
      if not known or string.sub(known, 1, width) ~= ARGV[at + 9] then return {'orphan', i} end
    end
    seen[place .. ':' .. seq] = ARGV[at + 6]
    fresh[#fresh + 1] = at
  end
end
if #fresh == 0 then return {'ok', 0} end

for _, at in ipairs(fresh) do
  redis.call('HSET', KEYS[MORE + tonumber(ARGV[at + 4])], ARGV[at + 3], ARGV[at + 6])
  local roots = tonumber(ARGV[at + 10])
  if roots > 0 and redis.call('LLEN', KEYS[MORE + roots]) < tonumber(room) then
    redis.call('RPUSH', KEYS[MORE + roots], ARGV[at + 11])
  end
end
return remember({'ok', #fresh})
