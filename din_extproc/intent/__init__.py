"""From head and body to an intent: what the request wants. Byte-exact, and without Python loops over text."""
