"""What runs on the server, each script in one piece: no other client sees half of it.

Besides records (`PREFIX:r:ID`) there are, so that nothing ever has to look at all keys: a sorted set for each scope
(tenant, model and namespace) of its records by expiry (`PREFIX:i:SCOPE`), a hash of scopes (`PREFIX:scopes`) and one of
totals (`PREFIX:totals`). Offsets are those of `records._HEADER`, counted from 1 as Lua does.
"""

from __future__ import annotations

__all__ = ("FORGET", "MATCH", "SAVE", "TOUCH", "TOUCH_LAST")

_SLIDE = """
local function slide(prefix, id, now, life)
  local key = prefix .. ':r:' .. id
  local head = redis.call('GETRANGE', key, 0, 47)
  if #head < 48 then return false end
  local expires = struct.unpack('<d', head, 25)
  if life < 0 then life = struct.unpack('<d', head, 17) end
  if now + life <= expires then return true end
  redis.call('SETRANGE', key, 24, struct.pack('<d', now + life))
  redis.call('PEXPIRE', key, math.ceil(life * 1000))
  local scope = string.gsub(string.sub(head, 33, 48), '.', function(c) return string.format('%02x', string.byte(c)) end)
  local member = id .. ':' .. redis.call('STRLEN', key)
  redis.call('ZADD', prefix .. ':i:' .. scope, 'XX', string.format('%.3f', now + life), member)
  return true
end
"""

MATCH = """
local found = {}
for i = 2, #ARGV do
  local key = ARGV[1] .. ':r:' .. ARGV[i]
  local head = redis.call('GETRANGE', key, 0, 47)
  if #head < 48 then break end
  found[#found + 1] = head
  found[#found + 1] = redis.call('STRLEN', key)
  found[#found + 1] = redis.call('GETRANGE', key .. 'snapshot', 0, 47)
end
return found
"""
"""prefix, ids of blocks -> for each that is held, up to the first that is not: header, size, header of its snapshot."""

SAVE = (
    _SLIDE
    + """
local prefix, id, now, life = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if not redis.call('SET', prefix .. ':r:' .. id, ARGV[5], 'NX', 'PX', math.ceil(life * 1000)) then
  slide(prefix, id, now, life)
  return 0
end
if redis.call('ZADD', prefix .. ':i:' .. ARGV[6], string.format('%.3f', now + life), ARGV[7]) == 1 then
  redis.call('HINCRBY', prefix .. ':totals', 'records', 1)
  redis.call('HINCRBY', prefix .. ':totals', 'nbytes', #ARGV[5])
  redis.call('HSETNX', prefix .. ':scopes', ARGV[6], ARGV[8])
end
return 1
"""
)
"""prefix, id, now, life, value, scope in hex, member, scope in JSON -> 1 if it was not held."""

TOUCH = (
    _SLIDE
    + """
for i = 4, #ARGV do slide(ARGV[1], ARGV[i], tonumber(ARGV[2]), tonumber(ARGV[3])) end
"""
)
"""prefix, now, life (-1: each record's own), ids."""

TOUCH_LAST = (
    _SLIDE
    + """
for i = #ARGV, 4, -1 do
  if slide(ARGV[1], ARGV[i], tonumber(ARGV[2]), tonumber(ARGV[3])) then return 1 end
end
return 0
"""
)
"""prefix, now, life, ids -> 1 if one of them is held; the last such one lives on."""

FORGET = """
local prefix, scope = ARGV[1], ARGV[2]
local index = prefix .. ':i:' .. scope
local members = redis.call('ZRANGEBYSCORE', index, '-inf', ARGV[3], 'LIMIT', 0, tonumber(ARGV[4]))
local gone, bytes, listed = 0, 0, 0
for _, member in ipairs(members) do
  local id, size = string.match(member, '^(.*):(%d+)$')
  redis.call('ZREM', index, member)
  listed = listed + tonumber(size)
  if redis.call('UNLINK', prefix .. ':r:' .. id) == 1 then
    gone = gone + 1
    bytes = bytes + tonumber(size)
  end
end
if #members > 0 then
  redis.call('HINCRBY', prefix .. ':totals', 'records', -#members)
  redis.call('HINCRBY', prefix .. ':totals', 'nbytes', -listed)
end
if redis.call('ZCARD', index) == 0 then redis.call('HDEL', prefix .. ':scopes', scope) end
return {#members, gone, bytes}
"""
"""prefix, scope, latest expiry (`+inf`: all), most -> how many were listed; how many records of how many bytes went."""
