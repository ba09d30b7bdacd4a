"""The TCPStore that workers meet in, served by a process of its own (rules I1-I6), and the coordinator's end of it."""
