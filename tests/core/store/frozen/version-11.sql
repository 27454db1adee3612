PRAGMA application_id = 1280461907;
BEGIN TRANSACTION;
CREATE TABLE aliases (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        alias TEXT NOT NULL,
        version INTEGER NOT NULL,
        at REAL NOT NULL,
        earlier INTEGER
    );
INSERT INTO "aliases" VALUES(1,'writer','production',1,1.79532136256998491293e+09,NULL);
INSERT INTO "aliases" VALUES(2,'writer','production',2,1.79532136256998491293e+09,1);
INSERT INTO "aliases" VALUES(3,'writer','production',1,1.79532136257099056248e+09,NULL);
CREATE TABLE answers (id TEXT PRIMARY KEY, run TEXT NOT NULL, until REAL NOT NULL, answer TEXT NOT NULL);
INSERT INTO "answers" VALUES('bf8cfc37a0c1b51f70651f2c3935092f','run',1.79533933342701935769e+09,'null');
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
        step_rewards TEXT NOT NULL DEFAULT '[]', labels TEXT NOT NULL DEFAULT '{}', step_states TEXT NOT NULL DEFAULT '[]',
        UNIQUE (rollout, attempt)
    );
INSERT INTO "attempts" VALUES(1,'a',1,'w',1.79532136257199645044e+09,1.79532136257601976393e+09,'reward','f16ea9c81a6eacb87e70a9b56f56e9370eb7813f891f4d254b876594929ffaf3','[["t","ok","c1",{"x":1},"out","",null,2.0]]','[[0.25,"fmt","call-a0",2.0]]','{"call-a1":["judge",["root","judge"]]}','[[{"k":1},"state","call-a0",2.0]]');
INSERT INTO "attempts" VALUES(2,'b',1,'w',1.79532136257199645044e+09,NULL,'','','[]','[]','{}','[]');
CREATE TABLE metrics (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        name TEXT NOT NULL,
        value REAL,
        at REAL NOT NULL,
        PRIMARY KEY (run, step, name)
    );
INSERT INTO "metrics" VALUES('run',0,'reward',0.5,1.79532136257799124724e+09);
INSERT INTO "metrics" VALUES('run',0,'odd',NULL,1.79532136257799124724e+09);
CREATE TABLE resources (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        kind TEXT NOT NULL,
        digest TEXT NOT NULL,
        content TEXT NOT NULL,
        metadata TEXT NOT NULL,
        created_at REAL NOT NULL,
        UNIQUE (name, version),
        UNIQUE (name, digest)
    );
INSERT INTO "resources" VALUES(1,'writer',1,'prompt','75783be376801e037b7e98b410f1aae86abcc3e3db4f49ac59871ed051a5ea93','"Write about {topic}."','{}',1.79532136256801342962e+09);
INSERT INTO "resources" VALUES(2,'writer',2,'prompt','cb156bb72ccab837b9542ced0d835857ce1d7b7eff9d9c6ef03a4679464132b2','"Rhyme about {topic}."','{"parent":1}',1.79532136256901931757e+09);
INSERT INTO "resources" VALUES(3,'limits',1,'config','3a2db7aec92b2a62a6d829920b6a8b561a748c13392dd56e2874c8fafaa9e2f7','{"k":[1,2.5]}','{}',1.79532136256901931757e+09);
CREATE TABLE revisions (run TEXT PRIMARY KEY, n INTEGER NOT NULL);
INSERT INTO "revisions" VALUES('run',5);
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
    , resources TEXT NOT NULL DEFAULT '{}', parent TEXT NOT NULL DEFAULT '');
INSERT INTO "rollouts" VALUES(1,'a','run','["task-6757e0f85a1b625b",{"q":"a"},null,{}]','g',0,'train',0,2,'succeeded',1,1,'',NULL,0.5,'{"f1":0.5}','','',3.0,0,'{"writer":2}','');
INSERT INTO "rollouts" VALUES(2,'b','run','["task-383f05701a3114f1",{"q":"b"},null,{}]','g',0,'train',1,2,'running',1,1,'w',1.79532496257199645044e+09,NULL,'{}','','',0.0,NULL,'{"writer":1}','');
INSERT INTO "rollouts" VALUES(3,'c','run','["task-9d86460c004c7b32",{"q":"c"},null,{}]','h',0,'val',0,2,'pending',0,0,'',NULL,NULL,'{}','','',0.0,NULL,'{}','["a",1,1]');
CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        config TEXT NOT NULL,
        created_at REAL NOT NULL
    , project TEXT NOT NULL DEFAULT 'default');
INSERT INTO "runs" VALUES(1,'run','a run','{"train_agents":["writer"]}',1000.0,'lab');
CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO "schema_version" VALUES(11);
CREATE TABLE spans (
        n INTEGER PRIMARY KEY,
        rollout INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        span_id TEXT NOT NULL,
        trace_id TEXT NOT NULL,
        parent_id TEXT NOT NULL,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL NOT NULL,
        status TEXT NOT NULL,
        error TEXT NOT NULL,
        service TEXT NOT NULL,
        attributes TEXT NOT NULL,
        UNIQUE (rollout, attempt, span_id)
    );
INSERT INTO "spans" VALUES(1,1,1,'2222222222222222','00000000000000000000000000000000','','step','internal',1.0,2.0,'unset','','app','{"k":[1]}');
CREATE TABLE state (
        run TEXT NOT NULL,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (run, name)
    );
INSERT INTO "state" VALUES('run','gateway_secret','"00ff"');
INSERT INTO "state" VALUES('run','cursor','[1]');
CREATE TABLE steps (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        policy_version INTEGER NOT NULL,
        rollouts TEXT NOT NULL,
        digests TEXT NOT NULL,
        digest TEXT NOT NULL,
        checkpoint TEXT NOT NULL,
        metrics TEXT NOT NULL,
        at REAL NOT NULL, group_ids TEXT NOT NULL DEFAULT '[]', context TEXT NOT NULL DEFAULT '{}',
        PRIMARY KEY (run, step)
    );
INSERT INTO "steps" VALUES('run',0,1,'[["a",1]]','["d0"]','digest','step-00000001','{"loss":0.5}',1001.0,'["g"]','{"epoch":0,"dtype":"float32"}');
CREATE TABLE tokens (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        scope TEXT NOT NULL,
        digest TEXT NOT NULL,
        project TEXT NOT NULL,
        name TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL
    );
INSERT INTO "tokens" VALUES(1,'t1','runner','abababababababababababababababababababababababababababababababab','lab','ci',1000.0,2000.0,NULL);
INSERT INTO "tokens" VALUES(2,'t2','admin','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd','*','me',1000.0,NULL,1.79532136257899713519e+09);
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
        tokens BLOB NOT NULL, tool_calls TEXT NOT NULL DEFAULT '[]', conversation TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '', max_tokens_asked INTEGER NOT NULL DEFAULT 0, requested_model TEXT NOT NULL DEFAULT '', exchange BLOB,
        UNIQUE (rollout, attempt, seq)
    );
INSERT INTO "transitions" VALUES(1,1,1,0,NULL,'call-a0','["writer",["root","writer"],"span"]','[[0,0]]','ok','',0,1.0,0,1.0,2.0,X'D3BB2DBB95B75010',X'015A5C6D4C6D595A7B000302021528B52FFD20106500003001020304050001001B280228B52FFD200C61000000000000000000000000BFBF','["t-0"]','','',0,'',NULL);
INSERT INTO "transitions" VALUES(2,1,1,1,1,'call-a1','["judge",["root","judge"]]','[[0,0]]','ok','',0,1.0,0,1.0,2.0,X'7D6680D71E00A1C9',X'014CE3AF2B64FB042C050101011028B52FFD20073900000607000000000028B52FFD200529000000000000BF','[]','','',0,'',NULL);
INSERT INTO "transitions" VALUES(3,2,1,0,1,'call-b0','["writer",["root","writer"],"span"]','[[0,0]]','ok','',0,1.0,0,1.0,2.0,X'F65F7F7EBC52116D',X'01BEC84E1BB8F9E811030001010E28B52FFD2005290000080000000028B52FFD20031900000000BF','[]','["call-x",1,{"role":"user","content":"q"},{"role":"assistant","content":"\u00e9"}]','',0,'',X'0100FFFFFFFF28B52FFD205DAD0200D245141A80B919034B2349F169FB2D8AC4761D4C08F9FEA522B185658C136D1C041032E79C90CC1AD25E7413E78AD4F28D385F4957526776E4AB05B3ABCA0C8018C6E1E1210AEE4D2A598A0E8A3AC53286537C0400');
CREATE INDEX rollouts_by_run ON rollouts (run, n);
CREATE INDEX rollouts_by_status ON rollouts (run, status, n);
CREATE INDEX rollouts_by_step ON rollouts (run, step, n);
CREATE INDEX rollouts_by_group ON rollouts (run, group_id);
CREATE INDEX rollouts_by_lease ON rollouts (run, lease_until) WHERE status = 'running';
CREATE INDEX rollouts_by_worker ON rollouts (worker) WHERE status = 'running';
CREATE INDEX transitions_roots ON transitions (rollout) WHERE parent IS NULL;
CREATE INDEX aliases_by_name ON aliases (name, alias, n);
CREATE INDEX runs_by_project ON runs (project, created_at);
CREATE INDEX answers_by_time ON answers (until);
CREATE INDEX answers_by_run ON answers (run) WHERE run <> '';
COMMIT;
