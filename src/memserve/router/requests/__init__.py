"""From arrival to the last output: attempts, sessions, replays."""
