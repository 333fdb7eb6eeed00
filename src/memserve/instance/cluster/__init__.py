"""What an instance does with other members: routers, peers, stores."""
