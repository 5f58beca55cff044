"""From an access-log entry to an ExchangeRecord: what did it really cost, and how did it end?"""
