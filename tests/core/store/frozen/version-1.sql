PRAGMA application_id = 1280461907;
BEGIN TRANSACTION;
CREATE TABLE attempts (
        n INTEGER PRIMARY KEY,
        rollout TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        worker TEXT NOT NULL,
        leased_at REAL NOT NULL,
        ended_at REAL,
        ending TEXT NOT NULL DEFAULT '',
        outcome_digest TEXT NOT NULL DEFAULT '',
        tool_events TEXT NOT NULL DEFAULT '[]',
        step_rewards TEXT NOT NULL DEFAULT '[]',
        UNIQUE (rollout, attempt)
    );
INSERT INTO "attempts" VALUES(1,'a',1,'w',1.79529687411299037928e+09,NULL,'','','[]','[]');
INSERT INTO "attempts" VALUES(2,'b',1,'w',1.79529687411299037928e+09,NULL,'','','[]','[]');
CREATE TABLE metrics (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        name TEXT NOT NULL,
        value REAL,
        at REAL NOT NULL,
        PRIMARY KEY (run, step, name)
    );
CREATE TABLE rollouts (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        run TEXT NOT NULL,
        task TEXT NOT NULL,
        group_id TEXT NOT NULL,
        step INTEGER NOT NULL,
        split TEXT NOT NULL,
        idx INTEGER NOT NULL,
        max_attempts INTEGER NOT NULL,
        status TEXT NOT NULL DEFAULT 'pending',
        attempt INTEGER NOT NULL DEFAULT 0,
        spent INTEGER NOT NULL DEFAULT 0,
        worker TEXT NOT NULL DEFAULT '',
        lease_until REAL,
        reward REAL,
        rewards TEXT NOT NULL DEFAULT '{}',
        fault TEXT NOT NULL DEFAULT '',
        error TEXT NOT NULL DEFAULT '',
        seconds REAL NOT NULL DEFAULT 0,
        trained_at_step INTEGER
    );
INSERT INTO "rollouts" VALUES(1,'a','run','["task-6757e0f85a1b625b",{"q":"a"},null,{}]','g',0,'train',0,2,'running',1,1,'w',1.79530047411299037928e+09,NULL,'{}','','',0.0,NULL);
INSERT INTO "rollouts" VALUES(2,'b','run','["task-383f05701a3114f1",{"q":"b"},null,{}]','g',0,'train',1,2,'running',1,1,'w',1.79530047411299037928e+09,NULL,'{}','','',0.0,NULL);
CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        config TEXT NOT NULL,
        created_at REAL NOT NULL
    );
INSERT INTO "runs" VALUES(1,'run','a run','{"train_agents":["writer"]}',1000.0);
CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO "schema_version" VALUES(1);
CREATE TABLE state (
        run TEXT NOT NULL,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (run, name)
    );
CREATE TABLE steps (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        policy_version INTEGER NOT NULL,
        rollouts TEXT NOT NULL,
        digests TEXT NOT NULL,
        digest TEXT NOT NULL,
        checkpoint TEXT NOT NULL,
        metrics TEXT NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (run, step)
    );
CREATE TABLE transitions (
        n INTEGER PRIMARY KEY,
        rollout INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        parent INTEGER,
        id TEXT NOT NULL,
        caller TEXT NOT NULL,
        versions TEXT NOT NULL,
        status TEXT NOT NULL,
        finish_reason TEXT NOT NULL,
        choice INTEGER NOT NULL,
        temperature REAL NOT NULL,
        constrained INTEGER NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL NOT NULL,
        digest BLOB NOT NULL,
        tokens BLOB NOT NULL,
        UNIQUE (rollout, attempt, seq)
    );
INSERT INTO "transitions" VALUES(1,1,1,0,NULL,'call-a0','["writer",["root","writer"],"span"]','[[0,1]]','ok','stop',0,1.0,0,1.5,2.5,X'4092F4CDB04F1CA9',X'015A5C6D4C6D595A7B000302021528B52FFD20106500003001020304050001001B280228B52FFD200C61000000000000000000000000BFBF');
INSERT INTO "transitions" VALUES(2,1,1,1,1,'call-a1','["writer",["root","writer"],"span"]','[[0,1]]','ok','stop',0,1.0,0,1.5,2.5,X'FA310AD3C1CBDB34',X'014CE3AF2B64FB042C050101011028B52FFD20073900000607000000000028B52FFD200529000000000000BF');
INSERT INTO "transitions" VALUES(3,2,1,0,1,'call-b0','["writer",["root","writer"],"span"]','[[0,1]]','ok','stop',0,1.0,0,1.5,2.5,X'9272BFD50412581F',X'01BEC84E1BB8F9E811030001010E28B52FFD2005290000080000000028B52FFD20031900000000BF');
CREATE INDEX rollouts_by_run ON rollouts (run, n);
CREATE INDEX rollouts_by_status ON rollouts (run, status, n);
CREATE INDEX rollouts_by_step ON rollouts (run, step, n);
CREATE INDEX rollouts_by_group ON rollouts (run, group_id);
CREATE INDEX rollouts_by_lease ON rollouts (run, lease_until) WHERE status = 'running';
CREATE INDEX rollouts_by_worker ON rollouts (worker) WHERE status = 'running';
CREATE INDEX transitions_roots ON transitions (rollout) WHERE parent IS NULL;
COMMIT;
