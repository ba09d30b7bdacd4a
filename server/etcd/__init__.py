"""Several coordinators on one etcd cluster: the way to it, leases, and who of them leads (rule E6)."""
