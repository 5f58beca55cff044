"""From head and body to an Intent: what does this request want? Byte-exact, and never a loop over text."""
