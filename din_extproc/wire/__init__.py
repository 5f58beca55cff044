"""ext_proc without sockets: events in, replies out. Sans-IO; only this room and `edge` know the protobuf messages."""
